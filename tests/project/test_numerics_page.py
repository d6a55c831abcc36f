"""The page of numbers: its rows are those that the program measures, and a few of each section are measured here (`make test-all`)."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.each import each

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "numerics.md"
# Of each section that takes no processes of its own, the rows that are measured: first, middle and last.
QUICK = (
    "The papers' loops",
    "TRL's losses",
    "NeMo-RL's keys",
    "Families and rotary embeddings",
    "Sampling options",
    "What differs by definition",
)
# Of the others, one row that is measured.
SLOW = {
    "Twenty steps of TRL's trainers": "SFTTrainer, tokens of the assistant",
    "One gradient over ranks": "context 3, ring, branches, tied",
}


@pytest.fixture(scope="module")
def sections() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        yield {section.title: section for section in importlib.import_module("numerics.catalogue").sections()}


def assert_within_bounds(section: Any, row: Any) -> None:
    numbers = row.measure()
    assert len(numbers) == len(section.columns)
    for number, bound in zip(numbers, section.bounds, strict=True):
        assert number is None or (math.isfinite(number) and number <= bound), (row.option, numbers)


@pytest.mark.exhaustive
@each("title", QUICK)
def test_rows_of_each_section_are_within_its_bounds(title: str, sections: dict[str, Any]) -> None:
    pytest.importorskip("trl")
    rows = sections[title].rows
    for row in (rows[0], rows[len(rows) // 2], rows[-1]):
        assert_within_bounds(sections[title], row)


@pytest.mark.exhaustive
@each("title", SLOW)
def test_a_whole_run_and_a_training_on_ranks_are_within_their_bounds(title: str, sections: dict[str, Any]) -> None:
    pytest.importorskip("trl")
    (row,) = (row for row in sections[title].rows if row.option == SLOW[title])
    assert_within_bounds(sections[title], row)


def test_the_page_has_the_rows_of_the_program(sections: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for section in sections.values():
        _, _, after = text.partition(f"## {section.title}\n")
        lines = [line for line in after.partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]
        found = [tuple(cell.strip().removeprefix("**") for cell in line.split("|")[1:3]) for line in lines]
        assert found == [(row.option, row.peer) for row in section.rows], section.title
    assert sum(len(section.rows) for section in sections.values()) >= 150
    assert text.count("above its bound**") == 0


def test_a_difference_above_its_bound_is_marked_and_ends_the_command_with_1(
    sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, main = (importlib.import_module(f"numerics.{name}") for name in ("sections", "__main__"))
    far = parts.Row("an option", "a peer", lambda: (0.5, None))
    near = parts.Row("another", "a peer", lambda: (1e-12, 0.0))
    absent = parts.Row("a third", "a peer", lambda: parts.NOT_RUN)
    broken = parts.Row("a fourth", "a peer", lambda: (1 / 0, 0.0))
    section = parts.Section("Numbers", "About.", ("value", "gradient"), (1e-9, 1e-9), (far, near, absent, broken))
    monkeypatch.setattr(main, "sections", lambda: (section,))
    assert main.main(["--only", "numbers"]) == 1
    page = capsys.readouterr().out
    assert "| **an option, above its bound** | a peer | 0.5 |  |" in page
    assert "| another | a peer | 1.0e-12 | 0 |" in page and "| a third | a peer | not installed |  |" in page
    assert "| **a fourth, above its bound** | a peer | failed | failed |" in page
    assert "above its bound: Numbers: an option against a peer" in page
