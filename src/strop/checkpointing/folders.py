"""Checkpoints as folders ``step_N/``, each whole or not there at all.

    step_170/
      config.yaml            the resolved configuration
      state.pt               step, stream (cursor, buffered groups), random states, metrics
      policy/weights/        a Hugging Face folder: from_pretrained loads it
      policy/optimizer.pt    optimizer and schedule

A checkpoint is written under another name, flushed to disk and renamed. Older ones go after that, also by way of a rename.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from strop.checkpointing.base import RunState
from strop.training.base import Learner

_STEP = re.compile(r"step_(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFolders:
    """Keeps the best ``keep_top_k`` checkpoints by a metric, and always the newest."""

    folder: Path
    config_text: str
    save_tokenizer: Callable[[Path], Any]
    keep_top_k: int | None = 3  # None keeps all
    metric: str | None = None  # as logged, such as validation/accuracy
    higher_is_better: bool = True
    save_optimizer: bool = True

    def save(self, state: RunState, learners: Mapping[str, Learner]) -> Path:
        target = self.folder / f"step_{state.step}"
        draft = self.folder / f".tmp_step_{state.step}"
        self._clear_leftovers()
        draft.mkdir(parents=True)
        for name, learner in learners.items():
            learner.save(draft / name, optimizer=self.save_optimizer)
        self.save_tokenizer(draft / "policy" / "weights")
        (draft / "config.yaml").write_text(self.config_text)
        torch.save({"state": state, "random": _random_states()}, draft / "state.pt")
        value = state.logged.get(self.metric) if self.metric else None
        (draft / "metric.json").write_text(json.dumps({"name": self.metric, "value": value, "step": state.step}))
        _flush(draft)
        if target.exists():
            _remove(target)
        draft.rename(target)
        _flush_directory(self.folder)
        self._prune(newest=state.step)
        return target

    def newest(self) -> Path | None:
        steps = self.steps()
        return self.folder / f"step_{steps[-1]}" if steps else None

    def steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        found = (_STEP.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def load(self, path: Path, learners: Mapping[str, Learner]) -> RunState:
        """Restore learners and random states in place. Raises CheckpointError."""
        try:
            saved = torch.load(path / "state.pt", weights_only=False)
            for name, learner in learners.items():
                learner.load(path / name)
        except (FileNotFoundError, KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be resumed from: {error}. Start afresh with another checkpointing.checkpoint_dir, or remove that folder "
                "to go back to the checkpoint before it"
            ) from error
        _restore_random_states(saved["random"])
        state: RunState = saved["state"]
        return state

    def _prune(self, newest: int) -> None:
        if self.keep_top_k is None:
            return
        ranked = sorted(self.steps(), key=self._rank, reverse=True)
        for step in ranked[self.keep_top_k :]:
            if step != newest:
                _remove(self.folder / f"step_{step}")

    def _rank(self, step: int) -> tuple[float, int]:
        """Better metric first, then newer; a checkpoint without the metric ranks below those with it."""
        try:
            value = json.loads((self.folder / f"step_{step}" / "metric.json").read_text())["value"]
        except (OSError, ValueError, KeyError):
            value = None
        if value is None or not math.isfinite(value):
            return -math.inf, step
        return (value if self.higher_is_better else -value), step

    def _clear_leftovers(self) -> None:
        """Half-written and half-removed folders of a process that was killed."""
        if self.folder.is_dir():
            for path in self.folder.glob(".tmp_step_*"):
                shutil.rmtree(path)


def _remove(path: Path) -> None:
    """Gone in one move; the files follow."""
    trash = path.with_name(f".tmp_{path.name}_removed")
    if trash.exists():
        shutil.rmtree(trash)
    path.rename(trash)
    shutil.rmtree(trash)


def _flush(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _flush_directory(path)
    _flush_directory(folder)


def _flush_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _restore_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
