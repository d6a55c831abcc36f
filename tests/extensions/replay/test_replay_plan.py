"""A replay begins with the checkpoint of the step before, from which training goes on as it went."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from strop.extensions.replay.replay_plan import ReplayError, find_earlier_settings, plan_replay
from strop.monitoring.run_starts import RunStart, record_run_start, record_start

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


def test_a_step_begins_with_the_checkpoint_of_the_step_before(tmp_path: Path) -> None:
    logs = write_run(tmp_path, checkpoints=(2, 5))
    assert plan_replay(logs, 1).source == "the initial model"
    assert plan_replay(logs, 3).source == "step_2"
    with pytest.raises(ReplayError, match=r"weights of step 7, and there is no checkpoint of them.*exactly: 1, 3, 6$"):
        plan_replay(logs, 8)


def test_a_step_without_rollouts_is_named(tmp_path: Path) -> None:
    logs = write_run(tmp_path, checkpoints=(2, 5), without_rollouts=(3, 4))
    with pytest.raises(ReplayError, match=r"step 3 stored no rollouts .*, and they cannot be sampled again; .* exactly: 1, 6$"):
        plan_replay(logs, 3)


def test_recorded_data_needs_no_stored_rollouts(tmp_path: Path) -> None:
    logs = write_run(tmp_path, section="sft", checkpoints=(3,), without_rollouts=range(1, STEPS + 1))
    assert plan_replay(logs, 4).source == "step_3"
    with pytest.raises(ReplayError, match=r"exactly: 1, 4$"):
        plan_replay(logs, 6)


def test_a_checkpoint_without_the_optimizer_is_passed_over_unless_the_run_went_on_from_it(tmp_path: Path) -> None:
    logs = write_run(tmp_path, checkpoints=(2, 5), save_optimizer=False)
    with pytest.raises(ReplayError, match=r"exactly: 1$"):
        plan_replay(logs, 6)
    record_run_start(logs, RunStart(after_step=5))
    assert plan_replay(logs, 6).source == "step_5"


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
