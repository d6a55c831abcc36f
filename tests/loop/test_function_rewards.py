"""Whole runs whose environment is plain functions in a file, named in the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loop.runs import grpo, metrics_of

pytestmark = pytest.mark.slow

FUNCTIONS = """
async def correct(task, rollout) -> bool:
    assert task.metadata["level"] in (0, 1)
    return rollout.text.strip() == task.answer

def digits(task, rollout):
    return sum(letter.isdigit() for letter in rollout.text) / 4

def longest(task, rollouts):
    most = max(rollout.sampled_tokens for rollout in rollouts)
    return [rollout.sampled_tokens == most for rollout in rollouts]
"""
SETTINGS: dict[str, Any] = {
    "env.arithmetic.max_operand": ...,
    "env.arithmetic.wording": ...,
    "data.train.env_name": ...,
    "data.train.dataset_name": "rows.jsonl",
    "data.train.split_validation_size": 8,
    "data.validation.env_name": ...,
    "data.validation.size": ...,
}


def test_rewards_of_several_functions_have_weights_and_see_the_group(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    rows = [{"prompt": f"{n}+{m}=", "answer": n + m, "level": m % 2} for n in range(6) for m in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    weighted = {"function": "rewards.py:digits", "weight": 0.5}
    rewards = {"correct": "rewards.py:correct", "digits": weighted, "longest": "rewards.py:longest"}
    outcome = grpo(tiny, tmp_path, **SETTINGS, **{"env.mine.rewards": rewards, "grpo.max_num_steps": 2})
    assert outcome.code == 0, outcome.err
    for line in metrics_of(tmp_path / "logs").values():
        parts = {name: line[f"train/rewards/{name}"] for name in rewards}
        assert line["train/reward"] == pytest.approx(parts["correct"] + 0.5 * parts["digits"] + parts["longest"])
        assert 0 < parts["longest"] <= 1 and line["validation/accuracy"] < line["validation/reward"]
