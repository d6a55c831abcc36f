"""What a checkpoint holds besides the learners, and the seam the loop saves through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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


class Checkpoints(Protocol):
    def save(self, state: RunState, learners: Mapping[str, Learner]) -> Path:
        """Save atomically; when this returns the checkpoint outlives a kill."""
        ...
