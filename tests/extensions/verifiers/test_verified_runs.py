"""Whole runs whose rewards are verifiers with gates and weights that change over the steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loop.runs import grpo, metrics_of
from strop.environments.rewards import WeightSchedule
from strop.monitoring.rollout_store.rollout_store import RolloutStore

pytestmark = pytest.mark.slow

POINTS = {0: 1.0, 2: 0.2}
CHANGES: dict[str, Any] = {
    "env.arithmetic.max_operand": ...,
    "env.arithmetic.wording": ...,
    "data.train.env_name": ...,
    "data.train.dataset_name": "rows.jsonl",
    "grpo.val_period": 0,
    "grpo.max_num_steps": 4,
    "grpo.num_generations_per_prompt": 4,
    "checkpointing.metric_name": None,
    "data.validation.env_name": ...,
    "data.validation.size": ...,
    "env.mine.rewards": {
        "right": {"verifier": "math", "method": "exact", "accuracy": True},
        "digit": {"verifier": "regex", "pattern": r"\d", "weight": {"schedule": "linear", "points": POINTS}},
        "short": {"verifier": "length", "limit": 3, "weight": 0.5, "gate": {"reward": "digit", "otherwise": None}},
    },
}


def write_rows(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"problem": f"{n}+{m}=", "answer": str(n + m)} for n in range(6) for m in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_weights_follow_the_steps_and_gated_rewards_their_gates(tiny, tmp_path):
    write_rows(tmp_path)
    outcome = grpo(tiny, tmp_path, **CHANGES)
    assert outcome.code == 0, outcome.err
    schedule = WeightSchedule("linear", tuple(POINTS.items()))
    for step, line in metrics_of(tmp_path / "logs").items():
        weighted = line["train/environments/mine/weighted/digit"]
        assert weighted == pytest.approx(schedule.at(step - 1) * line["train/rewards/digit"])
        assert 0 < line["train/rewards/digit"] <= 1
    records = list(RolloutStore(tmp_path / "logs").read_all())
    assert {"short" in record.rewards for record in records} == {True, False}
    assert all(("short" in record.rewards) == (record.rewards["digit"] == 1.0) for record in records)
