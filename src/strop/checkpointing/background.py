"""Checkpoints that are written in the background while training continues."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from strop.checkpointing.base import Restorable, RunState, Saveable, Stageable
from strop.checkpointing.folders import FolderCheckpointer, get_random_states
from strop.storage.short_path import shorten_path


class BackgroundCheckpointer:
    """Copies the state to save and writes it in a thread, one checkpoint at a time.

    An incomplete checkpoint has a temporary name, so a kill leaves the previous one intact. Call ``finish`` before the run ends. If a
    learner does not support staging, the checkpoint is written before ``save`` returns.
    """

    def __init__(self, folders: FolderCheckpointer) -> None:
        self.folders = folders
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="strop-checkpoint")
        self._pending: Future[Path] | None = None
        self.wait_seconds = 0.0  # total seconds spent waiting for the previous checkpoint

    def save(self, state: RunState, learners: Mapping[str, Restorable]) -> Path:
        """Start to save, and return the folder that the checkpoint will have. Raises the error of the previous save."""
        self.finish()
        staged: dict[str, Saveable] = {}
        for name, learner in learners.items():
            if not isinstance(learner, Stageable):
                return self.folders.save(state, learners)
            staged[name] = learner.stage(optimizer=self.folders.save_optimizer)
        self._pending = self._thread.submit(self.folders.write, state, get_random_states(), staged)
        return shorten_path(self.folders.folder / f"step_{state.step}")

    def finish(self) -> None:
        """Wait until the checkpoint in progress is complete. Raises its error."""
        if self._pending is not None:
            started, pending, self._pending = time.monotonic(), self._pending, None
            pending.result()
            self.wait_seconds += time.monotonic() - started
