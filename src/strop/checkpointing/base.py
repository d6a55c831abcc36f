"""What a checkpoint holds besides the learners, and the seam the loop saves through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from strop.rollouts.stream import StreamState
from strop.stopping import EarlyStop
from strop.training.base import Learner


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stands after ``step``."""

    step: int
    stream: StreamState
    logged: Mapping[str, float]  # the step's metrics: the record of a step that was saved but not yet written down
    early_stop: EarlyStop | None = None


class Savable(Protocol):
    """A learner, or what one held at some moment."""

    def save(self, folder: Path, *, optimizer: bool = True) -> None: ...


@runtime_checkable
class Stages(Protocol):
    """A learner that can put aside what it holds, and train on while that is written."""

    def stage(self, *, optimizer: bool = True) -> Savable:
        """Copies, as it is now. Their ``save`` may be called in another thread."""
        ...


class Checkpoints(Protocol):
    def save(self, state: RunState, learners: Mapping[str, Learner]) -> Path:
        """Save atomically; the checkpoint outlives a kill when this returns, or where it is written in the background when ``finish``
        does or another save returns."""
        ...

    def finish(self) -> None:
        """Wait for what is written in the background. Raises what went wrong with it."""
        ...
