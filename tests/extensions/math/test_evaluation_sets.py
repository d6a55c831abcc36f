"""The evaluation sets: their wording and their other names."""

from __future__ import annotations

from strop.data.builtin_sets import BUILTIN_DATASETS
from strop.extensions.math.math_sets import (
    BOXED,
    BOXED_LIST,
    CHOICE_ALIASES,
    MATH_ALIASES,
    REPORTED,
    REPORTED_CHOICES,
    word_choice,
)

WORDINGS = {
    **dict.fromkeys(REPORTED, BOXED),
    **dict.fromkeys(REPORTED_CHOICES, word_choice("ABCD")),
    "OlympiadBench": BOXED_LIST,
    "DAPOMathAIME2024": None,  # it is in the data
    "mmlu_pro": word_choice("A, B, C, D, E, F, G, H, I, J"),
}


def test_every_set_is_worded_as_papers_report_it() -> None:
    assert {name: entry.prompt for name, entry in {**REPORTED, **REPORTED_CHOICES}.items()} == WORDINGS


def test_other_names_are_the_same_entries() -> None:
    for alias, name in {**MATH_ALIASES, **CHOICE_ALIASES}.items():
        assert BUILTIN_DATASETS[alias] == BUILTIN_DATASETS[name]
