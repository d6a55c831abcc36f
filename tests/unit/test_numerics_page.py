"""The page of numbers: its rows are those that the program measures, and a few of each section are measured here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "numerics.md"


@pytest.fixture(scope="module")
def sections() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        yield {section.title: section for section in importlib.import_module("numerics.catalogue").sections()}


def test_the_page_has_the_rows_of_the_program(sections: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for section in sections.values():
        _, _, after = text.partition(f"## {section.title}\n")
        lines = [line for line in after.partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]
        found = [tuple(cell.strip().removeprefix("**") for cell in line.split("|")[1:3]) for line in lines]
        assert found == [(row.option, row.peer) for row in section.rows], section.title
    assert sum(len(section.rows) for section in sections.values()) >= 150
    assert text.count("above its bound**") == 0
