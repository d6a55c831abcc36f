"""The names that other libraries give to metrics."""

from __future__ import annotations

import re
from pathlib import Path

from strop.extensions.trackers.aliases import TRL, VERL, add_aliases

PAGE = Path(__file__).parents[3] / "docs" / "tracking.md"


def test_own_names_win_over_aliases() -> None:
    shown = add_aliases({"train/reward": 1.0, "train/margin": 2.0, "train/rewards/margins": 3.0, "train/rewards/correct": 4.0})
    assert shown["train/rewards/margins"] == 3.0 and shown["train/rewards/correct/mean"] == 4.0
    assert shown["critic/score/mean"] == 1.0


def test_no_two_metrics_share_an_alias() -> None:
    for table in (TRL, VERL):
        assert len(set(table.values())) == len(table)


def test_the_page_lists_the_same_names() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) \| (.*?) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    listed = {name: (trl.strip("`"), verl.strip("`")) for name, trl, verl in rows if name in {*TRL, *VERL}}
    assert listed == {name: (TRL.get(name, ""), VERL.get(name, "")) for name in {*TRL, *VERL}}
