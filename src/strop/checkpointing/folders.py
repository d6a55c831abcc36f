"""Checkpoints as folders ``step_N/``, written atomically.

    step_170/
      config.yaml            the resolved configuration
      state.pt               step, stream (cursor, buffered groups), random states, metrics
      files.json             saved files and their sizes, to detect missing or truncated ones
      metric.json            the metric that ranks checkpoints
      policy/weights/        a Hugging Face folder for from_pretrained
      policy/ema/            another one with averaged weights, with policy.ema.enabled
      policy/optimizer.pt    optimizer and schedule

A checkpoint is written under a temporary name, flushed to disk and renamed. Older checkpoints are removed afterwards, renamed first.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch

from strop.checkpointing.base import RunState, Saveable
from strop.checkpointing.step_folders import list_steps
from strop.learner.client import LearnerClient

# Classes in state.pt of earlier versions -> their current module and name.
_MOVED = {
    ("strop.data.examples", "Conversation"): ("strop.data.recorded.examples", "Conversation"),
    ("strop.data.examples", "Preference"): ("strop.data.recorded.examples", "Preference"),
    ("strop.data.examples", "Judged"): ("strop.data.recorded.examples", "UnpairedPreference"),
    ("strop.environments.hosted", "RemoteTask"): ("strop.environments.remote", "RemoteTask"),
}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class FolderCheckpointer:
    """Keeps the best ``keep_top_k`` checkpoints by a metric, and always the newest."""

    folder: Path
    config_text: str
    save_tokenizer: Callable[[Path], Any]
    keep_top_k: int | None = 3  # None keeps all
    metric: str | None = None  # name as logged, such as validation/accuracy
    higher_is_better: bool = True
    save_optimizer: bool = True

    def save(self, state: RunState, learners: Mapping[str, LearnerClient]) -> Path:
        return self.write(state, get_random_states(), learners)

    def write(self, state: RunState, randomness: Mapping[str, Any], learners: Mapping[str, Saveable]) -> Path:
        """Write the checkpoint of ``state``, with the learners and random states (``get_random_states``) of the same moment."""
        target = self.folder / f"step_{state.step}"
        draft = self.folder / f".tmp_step_{state.step}"
        self._clear_leftovers()
        draft.mkdir(parents=True)
        for name, learner in learners.items():
            learner.save(draft / name, optimizer=self.save_optimizer)
        for weights in (draft / "policy" / "weights", draft / "policy" / "ema"):
            if weights.is_dir():
                self.save_tokenizer(weights)
        (draft / "config.yaml").write_text(self.config_text)
        torch.save({"state": state, "random": randomness}, draft / "state.pt")
        value = state.logged.get(self.metric) if self.metric else None
        (draft / "files.json").write_text(json.dumps(_file_sizes(draft, ["state.pt", *learners]), indent=1))
        (draft / "metric.json").write_text(json.dumps({"name": self.metric, "value": value, "step": state.step}))
        _fsync_tree(draft)
        if target.exists():
            _remove_atomically(target)
        draft.rename(target)
        _fsync_directory(self.folder)
        self._prune(newest=state.step)
        return target

    def finish(self) -> None:
        """Do nothing: this class does not save in the background."""

    def find_newest(self) -> Path | None:
        steps = self.list_steps()
        return self.folder / f"step_{steps[-1]}" if steps else None

    def list_steps(self) -> list[int]:
        return list_steps(self.folder)

    def load(self, path: Path, learners: Mapping[str, LearnerClient]) -> RunState:
        """Restore learners and random states in place. Raises CheckpointError."""
        try:
            _check_sizes(path)
            saved = torch.load(path / "state.pt", weights_only=False, pickle_module=_STATE_PICKLE)
            state: RunState = saved["state"]
            for name, learner in learners.items():
                learner.load(path / name)
            _set_random_states(saved["random"])
        except Exception as error:  # each file format raises its own errors for broken files
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, FileNotFoundError) else str(error)
            raise CheckpointError(
                f"{path} cannot be resumed from: {reason}. Start over with another checkpointing.checkpoint_dir, or remove that folder "
                "to go back to the previous checkpoint"
            ) from error
        return state

    def verify(self, path: Path) -> None:
        """Raise CheckpointError if files of a checkpoint are missing or damaged."""
        try:  # stands in for the checksums of helper `folders`: take theirs
            _check_sizes(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error

    def archive(self) -> Path | None:
        """Move the checkpoints of an earlier run to ``previous_N/`` and return that folder, or None if there are no checkpoints."""
        steps = self.list_steps()
        if not steps:
            return None
        numbers = [int(path.name[9:]) for path in self.folder.glob("previous_*") if path.name[9:].isdigit()]
        target = self.folder / f"previous_{max(numbers, default=0) + 1}"
        target.mkdir()
        for step in reversed(steps):  # newest first, so that after a kill in between none looks like the newest of the new run
            (self.folder / f"step_{step}").rename(target / f"step_{step}")
        return target

    def _prune(self, newest: int) -> None:
        if self.keep_top_k is None:
            return
        ranked = sorted(self.list_steps(), key=self._ranking_key, reverse=True)
        for step in ranked[self.keep_top_k :]:
            if step != newest:
                _remove_atomically(self.folder / f"step_{step}")

    def _ranking_key(self, step: int) -> tuple[float, int]:
        """Return the sort key: higher for a better metric, then for newer checkpoints. Those without the metric rank lowest."""
        try:
            value = json.loads((self.folder / f"step_{step}" / "metric.json").read_text())["value"]
        except (OSError, ValueError, KeyError):
            value = None
        if value is None or not math.isfinite(value):
            return -math.inf, step
        return (value if self.higher_is_better else -value), step

    def _clear_leftovers(self) -> None:
        """Remove partly written and partly removed folders of a process that was killed."""
        if self.folder.is_dir():
            for path in self.folder.glob(".tmp_step_*"):
                shutil.rmtree(path)


class _StateUnpickler(pickle.Unpickler):
    """Finds classes of earlier versions under their new names."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(*_MOVED.get((module, name), (module, name)))


_STATE_PICKLE = SimpleNamespace(__name__="pickle", Unpickler=_StateUnpickler, load=pickle.load)


def _file_sizes(folder: Path, entries: Iterable[str]) -> dict[str, int]:
    """Return the sizes in bytes of all files in ``entries`` (files or folders), by relative path."""
    paths = [
        path for entry in entries for path in ((folder / entry).rglob("*") if (folder / entry).is_dir() else [folder / entry])
    ]
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(paths) if path.is_file()}


def _check_sizes(folder: Path) -> None:
    """Raise FileNotFoundError for a missing file, ValueError for a file whose size differs from the saved one."""
    expected: dict[str, int] = json.loads((folder / "files.json").read_text())
    actual = _file_sizes(folder, expected)
    for name, size in expected.items():
        if name not in actual:
            raise FileNotFoundError(f"{folder / name} is missing")
        if actual[name] != size:
            raise ValueError(f"{folder / name} has {actual[name]} bytes, and {size} were saved")


def _remove_atomically(path: Path) -> None:
    """Remove a folder atomically, by renaming it first."""
    trash = path.with_name(f".tmp_{path.name}_removed")
    if trash.exists():
        shutil.rmtree(trash)
    path.rename(trash)
    shutil.rmtree(trash)


def _fsync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _fsync_directory(path)
    _fsync_directory(folder)


def _fsync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def get_random_states() -> dict[str, Any]:
    """Return the states of all random number generators: Python, NumPy, torch and CUDA."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
