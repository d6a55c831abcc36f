"""Built-in datasets: short names for datasets of the hub, with their columns."""

from __future__ import annotations

from dataclasses import dataclass

from strop.data.sources.choices import Choices

SIMPLE_EVALS = "https://openaipublic.blob.core.windows.net/simple-evals"


@dataclass(frozen=True)
class BuiltinDataset:
    hub: str  # OWNER/NAME, or the address of a file
    split: str = "train"
    input_key: str = "problem"
    output_key: str = "answer"
    subset: str | None = None  # several, joined, have commas between them
    answer_marker: str | None = None  # the reference answer follows the last occurrence
    choices: Choices | None = None  # of multiple-choice questions


def _mmlu(language: str = "") -> BuiltinDataset:
    letters = Choices(options=("A", "B", "C", "D"))
    return BuiltinDataset(f"{SIMPLE_EVALS}/mmlu{language}.csv", input_key="Question", output_key="Answer", choices=letters)


def _gpqa(subset: str) -> BuiltinDataset:
    options = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    choices = Choices(options=options, first_is_correct=True)
    return BuiltinDataset("Idavidrein/gpqa", input_key="Question", output_key=options[0], subset=subset, choices=choices)


MMLU_LANGUAGES = (
    *(
        "AR-XY",
        "BN-BD",
        "DE-DE",
        "ES-LA",
        "FR-FR",
        "HI-IN",
        "ID-ID",
        "IT-IT",
        "JA-JP",
        "KO-KR",
        "PT-BR",
        "ZH-CN",
        "SW-KE",
        "YO-NG",
    ),
)
BUILTIN_DATASETS = {
    "OpenMathInstruct-2": BuiltinDataset("nvidia/OpenMathInstruct-2", split="train_1M", output_key="expected_answer"),
    "DeepScaler": BuiltinDataset("agentica-org/DeepScaleR-Preview-Dataset"),
    "DAPOMath17K": BuiltinDataset("BytedTsinghua-SIA/DAPO-Math-17k", "train", "prompt.0.content", "reward_model.ground_truth"),
    "DAPOMathAIME2024": BuiltinDataset("BytedTsinghua-SIA/AIME-2024", "train", "prompt.0.content", "reward_model.ground_truth"),
    "AIME2024": BuiltinDataset("HuggingFaceH4/aime_2024"),
    "AIME2025": BuiltinDataset("opencompass/AIME2025", "test", "question", subset="AIME2025-I,AIME2025-II"),
    "AIME2026": BuiltinDataset("MathArena/aime_2026"),
    "OpenR1-Math-220k": BuiltinDataset("open-r1/OpenR1-Math-220k", subset="default"),
    "math": BuiltinDataset(f"{SIMPLE_EVALS}/math_test.csv", input_key="Question", output_key="Answer"),
    "math500": BuiltinDataset("HuggingFaceH4/MATH-500", "test"),
    "gsm8k": (GSM8K := BuiltinDataset("openai/gsm8k", input_key="question", subset="main", answer_marker="####")),
    "GSM8K": GSM8K,
    # Multiple choice, for the verifiers english_multichoice and multilingual_multichoice of the environment math.
    "mmlu": _mmlu(),
    "mmlu_EN-US": _mmlu(),
    **{f"mmlu_{language}": _mmlu(f"_{language}") for language in MMLU_LANGUAGES},
    "mmlu_pro": BuiltinDataset("TIGER-Lab/MMLU-Pro", "test", "question", choices=Choices(options=("options",))),
    "gpqa": _gpqa("gpqa_main"),
    "gpqa_diamond": _gpqa("gpqa_diamond"),
    # Recorded answers and preferences: their layout is detected from their columns (strop.data.recorded.layouts).
    "squad": BuiltinDataset("rajpurkar/squad", input_key="question", output_key="answers.text.0"),
    "tulu3_sft_mixture": BuiltinDataset("allenai/tulu-3-sft-mixture"),
    "Nemotron-Cascade-2-SFT-Math": BuiltinDataset("nvidia/Nemotron-Cascade-2-SFT-Data", subset="math"),
    "HelpSteer3": BuiltinDataset("nvidia/HelpSteer3", subset="preference"),
    "Tulu3Preference": BuiltinDataset("allenai/llama-3.1-tulu-3-8b-preference-mixture"),
    "HuggingFaceH4/ultrafeedback_binarized": BuiltinDataset("HuggingFaceH4/ultrafeedback_binarized", split="train_prefs"),
}
