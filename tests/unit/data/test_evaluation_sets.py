"""The table of evaluation sets in docs/evaluation.md, and the entries that it describes."""

from __future__ import annotations

from pathlib import Path

from strop.data.builtin_sets import (
    BOXED,
    BOXED_LIST,
    BUILTIN_DATASETS,
    CHOICE_ALIASES,
    MATH_ALIASES,
    MMLU_LANGUAGES,
    REPORTED,
    REPORTED_CHOICES,
    word_choice,
)

PAGE = (Path(__file__).parents[3] / "docs" / "evaluation.md").read_text(encoding="utf-8")
WORDINGS = {
    "in the data": None,
    "box": BOXED,
    "box, several answers": BOXED_LIST,
    "letter": word_choice("ABCD"),
    "letter of ten": word_choice("A, B, C, D, E, F, G, H, I, J"),
}


def read_table() -> list[list[str]]:
    lines = PAGE.partition("| name | also |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def test_the_table_has_every_set_with_its_other_names_its_data_its_verifier_and_its_wording() -> None:
    aliases = {**MATH_ALIASES, **CHOICE_ALIASES}
    listed = set()
    for name, also, data, _, verifier, wording in read_table():
        plain = name.strip("`")
        names = [plain.replace("LANGUAGE", language) for language in MMLU_LANGUAGES] if "LANGUAGE" in plain else [plain]
        listed |= set(names)
        assert sorted(also.replace("`", "").split(", ") if also else []) == sorted(a for a, of in aliases.items() if of == plain)
        for each in names:
            entry = BUILTIN_DATASETS[each]
            assert (
                data.split(",")[0].replace("simple-evals", "https://openaipublic.blob.core.windows.net/simple-evals") in entry.hub
            )
            assert entry.grader is not None and f"`{entry.grader.options['verifier']}`" == verifier
            assert entry.prompt == WORDINGS[wording]
    assert listed == {*REPORTED, *REPORTED_CHOICES}


def test_other_names_are_the_same_entries() -> None:
    for alias, name in {**MATH_ALIASES, **CHOICE_ALIASES}.items():
        assert BUILTIN_DATASETS[alias] == BUILTIN_DATASETS[name]
