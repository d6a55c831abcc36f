"""docs/guides/coming_from.md, held against the tables of `strop translate`: keys side by side there are so in the code too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strop.extensions.recipes.library_recipe import KeyTable, find_entry
from strop.extensions.recipes.trl.trl_keys import TRL_KEYS
from strop.extensions.recipes.verl.verl_keys import VERL_PPO_KEYS

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "coming_from.md").read_text()
TABLES: dict[str, KeyTable] = {
    "TrainingArguments": TRL_KEYS["grpo"],
    "ModelConfig": TRL_KEYS["grpo"],
    "GRPOConfig": TRL_KEYS["grpo"],
    "SFTConfig": TRL_KEYS["sft"],
    "DPOConfig": TRL_KEYS["dpo"],
    "RewardConfig": TRL_KEYS["reward"],
    "verl": VERL_PPO_KEYS,
}


def read_rows() -> list[tuple[str, str, list[str]]]:
    """Return (table, key there, keys of Strop) of each row."""
    rows, title = [], ""
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|"):
            title = ""
        elif len(cells) > 1 and cells[1].rstrip(" |") == "Strop":
            title = cells[0].strip("`")
        elif title in TABLES and not line.startswith("|---"):
            ours = re.findall(r"`([^`]+)`", cells[1])
            rows.append((title, ", ".join(re.findall(r"`([^`]+)`", cells[0])), ours))
    return rows


@pytest.mark.parametrize(("title", "keys", "ours"), read_rows(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_row_names_what_the_translation_writes(title: str, keys: str, ours: list[str]) -> None:
    written: set[str] = set()
    for key in keys.split(", "):
        entry = find_entry(TABLES[title], key)
        assert entry is not None, f"{key} is not in the table of {title}"
        written |= {name.replace("{section}", "grpo") for name in entry.to}
    assert [key for key in ours if key not in written] == []


def test_every_table_of_the_page_is_compared() -> None:
    assert {title for title, _, _ in read_rows()} >= {
        "TrainingArguments",
        "GRPOConfig",
        "SFTConfig",
        "DPOConfig",
        "RewardConfig",
        "verl",
    }
    assert PAGE.index("strop translate") < PAGE.index("## TRL")
