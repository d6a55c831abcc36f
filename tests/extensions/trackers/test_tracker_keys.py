"""Keys of trackers among those of a run: their folders, and what a change of one is to a run that continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from loop.fakes import FakeLearner
from strop.checkpointing.base import RunState
from strop.config import GrpoRunConfig, load_config
from strop.rollouts.stream import StreamState
from strop.runs.lifecycle import make_checkpoints
from strop.runs.run_folders import plan_resume


def test_the_folder_of_a_service_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(None, ["policy.model_name=m", "logger.wandb.dir=~/x/2"], root=GrpoRunConfig, check=False).config
    assert config.logger.wandb.dir == f"{tmp_path}/x/2"


def test_a_change_of_a_tracker_is_nothing_to_training(tmp_path: Path) -> None:
    places = [f"checkpointing.checkpoint_dir={tmp_path / 'results'}", f"logger.log_dir={tmp_path / 'logs'}"]
    words = ["policy.model_name=m", "env.arithmetic={}", *places]
    first, changed = (
        load_config(None, [*words, *more], root=GrpoRunConfig, check=False).config
        for more in ((), ("logger.wandb.name=a", "grpo.val_period=3"))
    )
    state = RunState(step=4, stream=StreamState(next_index=16, unfinished=(), finished=()), logged={})
    make_checkpoints(first, Path.exists).save(state, {"policy": FakeLearner()})
    assert {change.key for change in plan_resume(changed).changes} == {"grpo.val_period"}
