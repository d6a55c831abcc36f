"""Mathematical benchmark problems, each graded as usually reported."""

from __future__ import annotations

from collections.abc import Mapping

from strop.data.builtin.builtin_dataset import BuiltinDataset, Grader, Splits
from strop.data.builtin.wordings import BOXED, BOXED_LIST

SIMPLE_EVALS = "https://openaipublic.blob.core.windows.net/simple-evals"
TEST, ONLY = Splits(None, evaluation="test"), Splits(None, evaluation="train")
LAST_BOX = Grader("math", {"verifier": "boxed"})
OLYMPIAD = Grader("math", {"verifier": "olympiad"})
MINERVA = Grader("math", {"verifier": "minerva"})
LAST_NUMBER = Grader("math", {"verifier": "number"})
STATED = Grader("math", {"verifier": "dapo"})


def _competition(
    hub: str, splits: Splits = ONLY, *, input_key: str = "problem", output_key: str = "answer", subset: str | None = None
) -> BuiltinDataset:
    return BuiltinDataset(hub, splits, input_key, output_key, subset, grader=LAST_BOX, prompt=BOXED)


REPORTED: Mapping[str, BuiltinDataset] = {
    "AIME2024": _competition("HuggingFaceH4/aime_2024"),
    "AIME2025": _competition("opencompass/AIME2025", TEST, input_key="question", subset="AIME2025-I,AIME2025-II"),
    "AIME2026": _competition("MathArena/aime_2026"),
    "AMC": _competition("AI-MO/aimo-validation-amc"),
    "AMC23": _competition("math-ai/amc23", TEST, input_key="question"),
    "HMMT_Feb_2025": _competition("MathArena/hmmt_feb_2025"),
    "BRUMO_2025": _competition("MathArena/brumo_2025"),
    "math": _competition(f"{SIMPLE_EVALS}/math_test.csv", input_key="Question", output_key="Answer"),
    "math500": _competition("HuggingFaceH4/MATH-500", TEST),
    "OlympiadBench": BuiltinDataset(
        "Hothan/OlympiadBench",
        ONLY,
        input_key="question",
        output_key="final_answer.0",
        subset="OE_TO_maths_en_COMP",
        grader=OLYMPIAD,
        prompt=BOXED_LIST,
    ),
    "MinervaMath": BuiltinDataset("math-ai/minervamath", TEST, input_key="question", grader=MINERVA, prompt=BOXED),
    "gsm8k": BuiltinDataset(
        "openai/gsm8k",
        Splits("train", evaluation="test"),
        input_key="question",
        subset="main",
        revision="cc7b047b6e5bb11b4f1af84efc572db110a51b3c",
        answer_marker="####",
        grader=LAST_NUMBER,
        prompt=BOXED,
    ),
    "DAPOMathAIME2024": BuiltinDataset(  # each problem 32 times, in the wording of DAPO's training data
        "BytedTsinghua-SIA/AIME-2024",
        ONLY,
        input_key="prompt.0.content",
        output_key="reward_model.ground_truth",
        grader=STATED,
    ),
}
MATH_ALIASES: Mapping[str, str] = {  # common alternative names
    "aime24": "AIME2024",
    "aime2024": "AIME2024",
    "aime25": "AIME2025",
    "aime2025": "AIME2025",
    "aime26": "AIME2026",
    "aime2026": "AIME2026",
    "amc": "AMC",
    "amc23": "AMC23",
    "hmmt25": "HMMT_Feb_2025",
    "hmmt_feb_2025": "HMMT_Feb_2025",
    "brumo25": "BRUMO_2025",
    "brumo_2025": "BRUMO_2025",
    "MATH-500": "math500",
    "math_500": "math500",
    "olympiadbench": "OlympiadBench",
    "minerva": "MinervaMath",
    "minerva_math": "MinervaMath",
    "GSM8K": "gsm8k",
}
MATH_EVALUATION_SETS: Mapping[str, BuiltinDataset] = {
    **REPORTED,
    **{alias: REPORTED[name] for alias, name in MATH_ALIASES.items()},
}
