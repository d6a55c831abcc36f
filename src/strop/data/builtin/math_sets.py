"""Mathematical problems with a reference answer."""

from __future__ import annotations

from collections.abc import Mapping

from strop.data.builtin.builtin_dataset import BuiltinDataset, Splits

SIMPLE_EVALS = "https://openaipublic.blob.core.windows.net/simple-evals"
GSM8K = BuiltinDataset(
    "openai/gsm8k", Splits("train", evaluation="test"), input_key="question", subset="main", answer_marker="####"
)

MATH_SETS: Mapping[str, BuiltinDataset] = {
    "DAPOMathAIME2024": BuiltinDataset(
        "BytedTsinghua-SIA/AIME-2024", input_key="prompt.0.content", output_key="reward_model.ground_truth"
    ),
    "AIME2024": BuiltinDataset("HuggingFaceH4/aime_2024"),
    "AIME2025": BuiltinDataset(
        "opencompass/AIME2025", Splits(None, evaluation="test"), input_key="question", subset="AIME2025-I,AIME2025-II"
    ),
    "AIME2026": BuiltinDataset("MathArena/aime_2026"),
    "math": BuiltinDataset(f"{SIMPLE_EVALS}/math_test.csv", input_key="Question", output_key="Answer"),
    "math500": BuiltinDataset("HuggingFaceH4/MATH-500", Splits(None, evaluation="test")),
    "gsm8k": GSM8K,
    "GSM8K": GSM8K,
}
