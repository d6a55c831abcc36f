"""Mathematical problems with a reference answer."""

from __future__ import annotations

from collections.abc import Mapping

from strop.data.builtin.builtin_dataset import BuiltinDataset, Grader, Splits
from strop.data.builtin.wordings import BOXED

SIMPLE_EVALS = "https://openaipublic.blob.core.windows.net/simple-evals"
GSM8K = BuiltinDataset(
    "openai/gsm8k",
    Splits("train", evaluation="test"),
    input_key="question",
    subset="main",
    answer_marker="####",
    grader=Grader("math", {"verifier": "number"}),
    prompt=BOXED,
)

MATH_SETS: Mapping[str, BuiltinDataset] = {
    "DAPOMathAIME2024": BuiltinDataset(
        "BytedTsinghua-SIA/AIME-2024", input_key="prompt.0.content", output_key="reward_model.ground_truth"
    ),
}
