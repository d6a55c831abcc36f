"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from strop.checkpointing.base import RunState, Savable, Stages
from strop.checkpointing.folders import CheckpointFolders, random_states
from strop.training.base import Learner


class BackgroundCheckpoints:
    """What is to be saved is put aside at once and written by a thread; one checkpoint at a time.

    Until it is whole it lies under another name, so that a kill leaves the one before. ``finish`` must be called before the run ends.
    Learners that cannot put aside what they hold are saved before ``save`` returns.
    """

    def __init__(self, folders: CheckpointFolders) -> None:
        self.folders = folders
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="strop-checkpoint")
        self._pending: Future[Path] | None = None
        self.waited = 0.0  # seconds that ``save`` has waited for the checkpoint before, over the run

    def save(self, state: RunState, learners: Mapping[str, Learner]) -> Path:
        """The folder that the checkpoint will have. Raises what went wrong with the one before."""
        self.finish()
        staged: dict[str, Savable] = {}
        for name, learner in learners.items():
            if not isinstance(learner, Stages):
                return self.folders.save(state, learners)
            staged[name] = learner.stage(optimizer=self.folders.save_optimizer)
        self._pending = self._thread.submit(self.folders.write, state, random_states(), staged)
        return self.folders.folder / f"step_{state.step}"

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is whole. Raises what went wrong with it."""
        if self._pending is not None:
            began, pending, self._pending = time.monotonic(), self._pending, None
            pending.result()
            self.waited += time.monotonic() - began
