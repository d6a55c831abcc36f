"""A replay begins with the newest weights from which training goes on as it went, and trains the steps between again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from strop.build.replay.earlier_settings import find_earlier_settings, split_at_changes
from strop.build.replay.replay_error import ReplayError
from strop.build.replay.replay_plan import ReplayPlan, plan_replay
from strop.monitoring.config_history import record_start
from strop.monitoring.run_starts import RunStart, record_run_start

STEPS = 8


def write_run(
    folder: Path,
    *,
    checkpoints: Sequence[int] = (),
    without_rollouts: Sequence[int] = (),
    section: str = "grpo",
    save_optimizer: bool = True,
) -> Path:
    """Write what a plan looks at: the configuration, the metrics, which steps have rollouts and which checkpoints."""
    logs = folder / "logs"
    (logs / "rollouts").mkdir(parents=True)
    saving = {"checkpoint_dir": str(folder / "results"), "save_optimizer": save_optimizer}
    (logs / "config.yaml").write_text(json.dumps({section: {}, "checkpointing": saving}))
    lines = [{"step": step, "train/loss": 0.5, "timing/train/policy_training": 2.0} for step in range(STEPS + 1)]
    (logs / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in {*range(1, STEPS + 1)} - {*without_rollouts}:
        (logs / "rollouts" / f"step_{step:06d}.jsonl").touch()
    for step in checkpoints:
        (folder / "results" / f"step_{step}").mkdir(parents=True)
    return logs


def begins(plan: ReplayPlan) -> tuple[str, list[int], bool]:
    return plan.source, list(plan.between), plan.exact


def test_a_step_without_a_checkpoint_is_reached_from_the_newest_one_before_it(tmp_path: Path) -> None:
    logs = write_run(tmp_path, checkpoints=(2, 5))
    assert begins(plan_replay(logs, 1)) == ("the initial model", [], True)
    assert begins(plan_replay(logs, 2)) == ("the initial model", [1], True)
    assert begins(plan_replay(logs, 3)) == ("step_2", [], True)
    assert begins(plan_replay(logs, 8)) == ("step_5", [6, 7], True)
    assert plan_replay(logs, 8).expected_seconds == 4.0
    assert list(plan_replay(logs, 8).ready) == [1, 3, 6], "the cheap ones, which the hint names"
    assert begins(plan_replay(logs, 8, "nearest")) == ("step_5", [], False)
    assert begins(plan_replay(logs, 6, "nearest")) == ("step_5", [], True)


def test_a_limit_of_the_steps_between_is_kept(tmp_path: Path) -> None:
    logs = write_run(tmp_path, checkpoints=(2, 5))
    assert begins(plan_replay(logs, 7, retrain=1)) == ("step_5", [6], True)
    with pytest.raises(
        ReplayError, match=r"2 steps would be trained again .* --retrain allows 1; .*: 1, 2, 3, 4, 6, 7, or --wei"
    ):
        plan_replay(logs, 8, retrain=1)
    with pytest.raises(ReplayError, match="--retrain allows 0; steps that can be replayed exactly: 1, 3, 6, or"):
        plan_replay(logs, 2, retrain=0)


def test_a_step_between_without_rollouts_is_named(tmp_path: Path) -> None:
    logs = write_run(tmp_path, checkpoints=(5,), without_rollouts=(3, 4))
    with pytest.raises(
        ReplayError, match=r"step 3 stored no rollouts .*, nor did 1 more; .*: 1, 2, 6, 7, 8, or --weights nearest"
    ):
        plan_replay(logs, 5)
    with pytest.raises(ReplayError, match=r"step 3 stored no rollouts .*, and they cannot be sampled again"):
        plan_replay(logs, 3)
    assert begins(plan_replay(logs, 8)) == ("step_5", [6, 7], True)


def test_recorded_data_needs_no_stored_rollouts_and_has_no_nearest_weights(tmp_path: Path) -> None:
    logs = write_run(tmp_path, section="sft", without_rollouts=range(1, STEPS + 1))
    assert begins(plan_replay(logs, 4)) == ("the initial model", [1, 2, 3], True)
    with pytest.raises(ReplayError, match="--weights nearest: the run reads recorded data from the place that goes with its"):
        plan_replay(logs, 4, "nearest")


def test_a_checkpoint_without_the_optimizer_is_passed_over_unless_the_run_went_on_from_it(tmp_path: Path) -> None:
    logs = write_run(tmp_path, checkpoints=(2, 5), save_optimizer=False)
    assert begins(plan_replay(logs, 7)) == ("the initial model", [1, 2, 3, 4, 5, 6], True)
    assert begins(plan_replay(logs, 6, "nearest")) == ("step_5", [], False)
    record_run_start(logs, RunStart(after_step=5))
    assert begins(plan_replay(logs, 7)) == ("step_5", [6], True)


def test_a_step_has_the_settings_that_held_when_it_was_trained(tmp_path: Path) -> None:
    first = {"policy": {"optimizer": {"lr": 0.1}, "max_grad_norm": None}, "algorithm": {"kwargs": {}}}
    record_start(tmp_path, step=-1, config=first, changed={})
    changed = {"policy.optimizer.lr": (0.1, 0.2), "policy.max_grad_norm": (None, 1.0), "algorithm.kwargs.beta": (None, 0.3)}
    record_start(tmp_path, step=3, config={}, changed=changed)
    record_start(tmp_path, step=6, config={}, changed={"policy.optimizer.lr": (0.2, 0.4)})
    begin = {"policy.optimizer.lr=0.1", "policy.max_grad_norm=null", "~algorithm.kwargs.beta"}
    assert set(find_earlier_settings(tmp_path, 3)) == begin
    assert find_earlier_settings(tmp_path, 4) == ("policy.optimizer.lr=0.2",)
    assert find_earlier_settings(tmp_path, 7) == ()
    assert split_at_changes(tmp_path, range(2, 9)) == [range(2, 4), range(4, 7), range(7, 9)]
    assert split_at_changes(tmp_path, range(4, 7)) == [range(4, 7)]
