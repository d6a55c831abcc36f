"""Multiple-choice questions, for the verifiers english_multichoice and multilingual_multichoice of the environment math."""

from __future__ import annotations

from collections.abc import Mapping

from strop.data.builtin.builtin_dataset import BuiltinDataset, Choices, Splits
from strop.data.builtin.math_sets import SIMPLE_EVALS

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


def _mmlu(language: str = "") -> BuiltinDataset:
    letters = Choices(options=("A", "B", "C", "D"))
    return BuiltinDataset(f"{SIMPLE_EVALS}/mmlu{language}.csv", input_key="Question", output_key="Answer", choices=letters)


def _gpqa(subset: str) -> BuiltinDataset:
    options = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    choices = Choices(options=options, first_is_correct=True)
    return BuiltinDataset("Idavidrein/gpqa", input_key="Question", output_key=options[0], subset=subset, choices=choices)


CHOICE_SETS: Mapping[str, BuiltinDataset] = {
    "mmlu": _mmlu(),
    "mmlu_EN-US": _mmlu(),
    **{f"mmlu_{language}": _mmlu(f"_{language}") for language in MMLU_LANGUAGES},
    "mmlu_pro": BuiltinDataset(
        "TIGER-Lab/MMLU-Pro",
        Splits(None, validation="validation", evaluation="test"),
        input_key="question",
        choices=Choices(options=("options",)),
    ),
    "gpqa": _gpqa("gpqa_main"),
    "gpqa_diamond": _gpqa("gpqa_diamond"),
}
