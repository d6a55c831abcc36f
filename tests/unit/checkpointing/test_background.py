"""Checkpoints that are written beside training."""

from __future__ import annotations

import errno
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from strop.checkpointing.background import BackgroundCheckpointer
from strop.checkpointing.base import RunState
from strop.checkpointing.folders import FolderCheckpointer
from strop.rollouts.stream import StreamState
from strop.storage.storage_error import StorageError


@dataclass
class Plain:
    """Holds one number, and writes it when it may."""

    value: int = 0
    may_write: threading.Event = field(default_factory=threading.Event)
    fails: bool = False
    error: OSError = field(default_factory=lambda: OSError("no space left"))

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        Held(self.value, self).save(folder)

    def load(self, folder: Path) -> None:
        self.value = int((folder / "weights").read_text())


class Learner(Plain):
    def stage(self, *, optimizer: bool = True) -> Held:
        return Held(self.value, self)


@dataclass
class Held:
    value: int
    learner: Plain

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        assert self.learner.may_write.wait(10)
        if self.learner.fails:
            raise self.learner.error
        folder.mkdir(parents=True)
        (folder / "weights").write_text(str(self.value))


def checkpoints(folder: Path) -> BackgroundCheckpointer:
    return BackgroundCheckpointer(FolderCheckpointer(folder=folder, config_text="grpo: {}\n", save_tokenizer=lambda _: None))


def state(step: int) -> RunState:
    return RunState(step=step, stream=StreamState(next_index=step, unfinished=(), finished=()), logged={})


def test_training_goes_on_while_a_checkpoint_of_the_moment_is_written(tmp_path: Path) -> None:
    learner, saving = Learner(value=7), checkpoints(tmp_path)
    random.seed(3)
    path = saving.save(state(1), {"policy": learner})  # type: ignore[dict-item]
    wanted = random.random()
    learner.value = 8
    assert path == tmp_path / "step_1" and not path.exists()
    learner.may_write.set()
    saving.finish()
    assert (path / "policy" / "weights").read_text() == "7"
    again = Learner()
    saving.folders.load(path, {"policy": again})  # type: ignore[dict-item]
    assert again.value == 7 and random.random() == wanted


def test_before_a_checkpoint_is_whole_the_one_before_is_the_newest(tmp_path: Path) -> None:
    learner, saving = Learner(), checkpoints(tmp_path)
    learner.may_write.set()
    saving.save(state(1), {"policy": learner})  # type: ignore[dict-item]
    saving.finish()
    learner.may_write.clear()
    saving.save(state(2), {"policy": learner})  # type: ignore[dict-item]
    assert saving.folders.find_newest() == tmp_path / "step_1"
    learner.may_write.set()
    saving.finish()
    assert saving.folders.find_newest() == tmp_path / "step_2"
    saving.finish()  # nothing is under way


def test_one_checkpoint_is_written_at_a_time(tmp_path: Path) -> None:
    learner, saving = Learner(), checkpoints(tmp_path)
    saving.save(state(1), {"policy": learner})  # type: ignore[dict-item]
    threading.Timer(0.3, learner.may_write.set).start()
    saving.save(state(2), {"policy": learner})  # type: ignore[dict-item]
    assert (tmp_path / "step_1").exists() and saving.wait_seconds > 0.2
    saving.finish()


def test_what_went_wrong_is_raised_by_whoever_asks_next(tmp_path: Path) -> None:
    learner, saving = Learner(fails=True), checkpoints(tmp_path)
    learner.may_write.set()
    saving.save(state(1), {"policy": learner})  # type: ignore[dict-item]
    with pytest.raises(OSError, match="no space left"):
        saving.save(state(2), {"policy": learner})  # type: ignore[dict-item]
    assert saving.folders.find_newest() is None


def test_a_learner_that_cannot_put_aside_what_it_holds_is_saved_at_once(tmp_path: Path) -> None:
    learner, saving = Plain(value=5), checkpoints(tmp_path)
    learner.may_write.set()
    path = saving.save(state(1), {"policy": learner})  # type: ignore[dict-item]
    assert (path / "policy" / "weights").read_text() == "5"


def test_a_full_disk_is_said_by_the_next_save_which_does_not_start_and_the_one_after_does(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    learner, saving = Learner(fails=True, error=full), checkpoints(tmp_path)
    learner.may_write.set()
    saving.save(state(1), {"policy": learner})  # type: ignore[dict-item]
    with pytest.raises(StorageError, match=r"the checkpoint of step 1 was not saved in .*: the disk is full"):
        saving.save(state(2), {"policy": learner})  # type: ignore[dict-item]
    learner.fails = False
    saving.save(state(3), {"policy": learner})  # type: ignore[dict-item]
    saving.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]
