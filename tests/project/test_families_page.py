"""The table of families in docs/training.md says what the code decides; ``tests/support/family_table.py --write`` writes it."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from support.every_family import FAMILIES, make_config
from support.family_table import HEADER, find_row, read_rows
from support.sweep import sweep


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(FAMILIES, "llama", "gemma4", "qwen3_5", "lfm2", "jamba", "minimax"))
def test_the_cells_of_a_family_are_what_the_code_decides(name: str) -> None:
    kind, row = find_row(name)
    assert astuple(row) in read_rows()[kind]


def test_every_family_of_the_tests_has_a_row() -> None:
    rows = read_rows()
    assert rows.keys() == {make_config(name).model_type for name in FAMILIES}
    assert {len(cells) for found in rows.values() for cells in found} == {len(HEADER) - 1}
