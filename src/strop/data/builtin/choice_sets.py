"""Multiple-choice questions: a column with the letter of the right option, or the right option first."""

from __future__ import annotations

from collections.abc import Mapping

from strop.data.builtin.builtin_dataset import BuiltinDataset, Choices, Grader, Splits
from strop.data.builtin.math_evaluation_sets import SIMPLE_EVALS
from strop.data.builtin.wordings import word_choice

LAST_LETTER = Grader("math", {"verifier": "strict_multichoice"})
FOUR = word_choice("ABCD")
MMLU_LETTERS = Choices(options=("A", "B", "C", "D"))
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
    return BuiltinDataset(
        f"{SIMPLE_EVALS}/mmlu{language}.csv",
        Splits(None, evaluation="train"),  # the only split of a file at a URL
        input_key="Question",
        output_key="Answer",
        choices=MMLU_LETTERS,
        grader=LAST_LETTER,
        prompt=FOUR,
    )


def _mmmlu(subset: str) -> BuiltinDataset:
    return BuiltinDataset(
        "openai/MMMLU",
        Splits(None, evaluation="test"),
        input_key="Question",
        output_key="Answer",
        subset=subset,
        choices=MMLU_LETTERS,
        grader=LAST_LETTER,
        prompt=FOUR,
    )


def _gpqa(subset: str) -> BuiltinDataset:
    options = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    return BuiltinDataset(
        "Idavidrein/gpqa",
        Splits(None, evaluation="train"),
        input_key="Question",
        output_key=options[0],
        subset=subset,
        choices=Choices(options=options, first_is_correct=True),
        grader=LAST_LETTER,
        prompt=FOUR,
    )


REPORTED_CHOICES: Mapping[str, BuiltinDataset] = {
    "mmlu": _mmlu(),
    **{f"mmlu_{language}": _mmlu(f"_{language}") for language in MMLU_LANGUAGES},
    "mmmlu": _mmmlu("default"),  # all languages
    **{f"mmmlu_{language}": _mmmlu(language.replace("-", "_")) for language in MMLU_LANGUAGES},
    "mmlu_pro": BuiltinDataset(
        "TIGER-Lab/MMLU-Pro",
        Splits(None, validation="validation", evaluation="test"),
        input_key="question",
        choices=Choices(options=("options",)),
        grader=LAST_LETTER,
        prompt=word_choice("A, B, C, D, E, F, G, H, I, J"),
    ),
    "gpqa": _gpqa("gpqa_main"),
    "gpqa_diamond": _gpqa("gpqa_diamond"),
}
CHOICE_ALIASES: Mapping[str, str] = {  # common alternative names
    "MMLU": "mmlu",
    "mmlu_EN-US": "mmlu",
    "MMMLU": "mmmlu",
    "MMLU-Pro": "mmlu_pro",
    "mmlu-pro": "mmlu_pro",
    "GPQA": "gpqa",
    "GPQA-diamond": "gpqa_diamond",
    "gpqa-diamond": "gpqa_diamond",
}
CHOICE_SETS: Mapping[str, BuiltinDataset] = {
    **REPORTED_CHOICES,
    **{alias: REPORTED_CHOICES[name] for alias, name in CHOICE_ALIASES.items()},
}
