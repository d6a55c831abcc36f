"""Built-in datasets: short names for datasets of the hub, with their columns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BuiltinDataset:
    hub: str
    split: str = "train"
    input_key: str = "problem"
    output_key: str = "answer"
    subset: str | None = None
    answer_marker: str | None = None  # the reference answer follows the last occurrence


BUILTIN_DATASETS = {
    "OpenMathInstruct-2": BuiltinDataset("nvidia/OpenMathInstruct-2", split="train_1M", output_key="expected_answer"),
    "DeepScaler": BuiltinDataset("agentica-org/DeepScaleR-Preview-Dataset"),
    "DAPOMath17K": BuiltinDataset("BytedTsinghua-SIA/DAPO-Math-17k", "train", "prompt.0.content", "reward_model.ground_truth"),
    "DAPOMathAIME2024": BuiltinDataset("BytedTsinghua-SIA/AIME-2024", "train", "prompt.0.content", "reward_model.ground_truth"),
    "AIME2024": BuiltinDataset("HuggingFaceH4/aime_2024"),
    "AIME2025": BuiltinDataset("opencompass/AIME2025", "test", "question", subset="AIME2025-I"),
    "math500": BuiltinDataset("HuggingFaceH4/MATH-500", "test"),
    "gsm8k": BuiltinDataset("openai/gsm8k", input_key="question", subset="main", answer_marker="####"),
    # Recorded answers and preferences: their layout is detected from their columns (strop.data.recorded.layouts).
    "squad": BuiltinDataset("rajpurkar/squad", input_key="question", output_key="answers.text.0"),
    "tulu3_sft_mixture": BuiltinDataset("allenai/tulu-3-sft-mixture"),
    "HelpSteer3": BuiltinDataset("nvidia/HelpSteer3", subset="preference"),
    "Tulu3Preference": BuiltinDataset("allenai/llama-3.1-tulu-3-8b-preference-mixture"),
    "HuggingFaceH4/ultrafeedback_binarized": BuiltinDataset("HuggingFaceH4/ultrafeedback_binarized", split="train_prefs"),
}
