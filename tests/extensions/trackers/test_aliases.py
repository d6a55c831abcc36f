"""The names that other libraries give to metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loop.kinds import train_to_end
from loop.runs import grpo, metrics_of
from strop.extensions.trackers.aliases import TRL, VERL, add_aliases


def test_own_names_win_over_aliases() -> None:
    shown = add_aliases({"train/reward": 1.0, "train/margin": 2.0, "train/rewards/margins": 3.0, "train/rewards/correct": 4.0})
    assert shown["train/rewards/margins"] == 3.0 and shown["train/rewards/correct/mean"] == 4.0
    assert shown["critic/score/mean"] == 1.0


def test_no_two_metrics_share_an_alias() -> None:
    for table in (TRL, VERL):
        assert len(set(table.values())) == len(table)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_metric_with_an_alias_is_logged_by_a_run(tiny: Path, tmp_path: Path) -> None:
    changes = {"grpo.max_num_steps": 2, "loss_fn.reference_policy_kl_penalty": 0.01}
    assert (outcome := grpo(tiny, tmp_path, **changes)).code == 0, outcome.err
    for name in ("ppo", "dpo"):
        train_to_end(name, tiny, tmp_path / name, **{f"{name}.max_num_steps": 1})
    folders = (tmp_path, tmp_path / "ppo", tmp_path / "dpo")
    names = {name for folder in folders for line in metrics_of(folder / "logs").values() for name in line}
    pattern = {name: re.escape(name).replace(r"\{name\}", "[^/]+") for name in {*TRL, *VERL}}
    assert not [name for name in pattern if not any(re.fullmatch(pattern[name], logged) for logged in names)], (
        "aliases of nothing"
    )
