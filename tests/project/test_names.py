"""The page of names is what the code has."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_of_names_is_what_the_data_sets_and_aliases_generate() -> None:
    rendered = runpy.run_path(str(ROOT / "benchmarks" / "names.py"))["render"]()
    committed = (ROOT / "docs" / "names.md").read_text(encoding="utf-8")
    assert committed == rendered, "run: python benchmarks/names.py > docs/names.md"
