"""Whole runs with a curriculum: the reward rises faster, and a killed run chooses the same tasks."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from loop.killing import Kill
from loop.kinds import assert_same_run
from loop.mixed_tasks import mixed_config
from loop.runs import metrics_of, overrides, strop
from support.sweep import sweep

pytestmark = pytest.mark.slow

STEPS = 30
FEW = {
    "env.mixed.learnable": 4,
    "env.mixed.impossible": 44,
    "env.mixed.trivial": 0,
    "policy.optimizer.kwargs.lr": 0.001,
    "grpo.num_prompts_per_step": 4,
    "grpo.val_period": 2,
}
BY_SUCCESS = {"data.curriculum.name": "success_rate"}
SAVED = {"checkpointing.enabled": True, "checkpointing.save_period": 8}


def play(folder: Path, model: Path, seed: int, before: Any = None, **changes: Any) -> int:
    return strop("grpo", *overrides(mixed_config(model, seed, STEPS, **FEW, **changes)), folder=folder, before=before).code


def average(folder: Path, name: str) -> float:
    """Mean of a metric over the steps that have it: of the accuracy of validations, the area under its curve."""
    return mean(line[name] for line in metrics_of(folder / "logs").values() if name in line)


@pytest.fixture(scope="module")
def by_success(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("by_success")
    assert play(folder, tiny, 1, **BY_SUCCESS, **SAVED) == 0
    return folder


@pytest.mark.parametrize("seed", sweep([1, 2, 3]))
def test_a_curriculum_by_success_raises_the_reward_faster(seed: int, tiny: Path, tmp_path: Path, by_success: Path) -> None:
    folder = by_success if seed == 1 else tmp_path / "by_success"
    if seed > 1:
        assert play(folder, tiny, seed, **BY_SUCCESS) == 0
    assert play(tmp_path / "none", tiny, seed) == 0
    assert average(folder, "validation/accuracy") > average(tmp_path / "none", "validation/accuracy") + 0.01
    assert average(folder, "train/groups_without_signal") < average(tmp_path / "none", "train/groups_without_signal")
    last = metrics_of(folder / "logs")[STEPS]
    assert last["train/curriculum/impossible"] > 0.3 and last["train/curriculum/never_seen"] < 1  # logged, and known by then


@pytest.mark.exhaustive
def test_a_killed_run_goes_on_with_the_same_tasks(tiny: Path, tmp_path: Path, by_success: Path) -> None:
    assert play(tmp_path, tiny, 1, Kill("at the stored rollouts", 11), **BY_SUCCESS, **SAVED) == -9
    assert play(tmp_path, tiny, 1, **BY_SUCCESS, **SAVED) == 0
    assert_same_run(tmp_path, by_success)
    (state,) = json.loads((by_success / "results" / f"step_{STEPS}" / "data" / "state.json").read_text()).values()
    assert state["name"] == "success_rate" and len(state["entries"][0]["seen"]) > 15 and state["next"] == 4 * STEPS
