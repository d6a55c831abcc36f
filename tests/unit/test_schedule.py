"""The order in which workers take files of tests."""

from __future__ import annotations

from pathlib import Path

from support.schedule import DIVIDED, LONGEST, TOGETHER

ROOT = Path(__file__).parents[2]


def test_the_files_that_are_named_exist() -> None:
    named = {*LONGEST, *TOGETHER, *TOGETHER.values(), *DIVIDED}
    assert sorted(file for file in named if not (ROOT / file).is_file()) == []
    assert len(set(LONGEST)) == len(LONGEST) and not set(LONGEST) & set(TOGETHER)
