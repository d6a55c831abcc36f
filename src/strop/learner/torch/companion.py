"""What an extension trains alongside the policy, from the policy's own passes: nothing of it reaches the policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from strop.learner.torch.optimizer import ScheduleUnit
from strop.learner.torch.optimizer_config import OptimizerConfig, SchedulerConfig
from strop.metrics import Metrics
from strop.sampling import Sampling
from strop.types import Batch


@dataclass(frozen=True, kw_only=True)
class CompanionOptions:
    """How the policy is trained."""

    optimizer: OptimizerConfig
    max_grad_norm: float | None
    scheduler: SchedulerConfig
    schedule_unit: ScheduleUnit
    schedule_length: int | None  # steps of the schedule in the run; None: no limit
    sampling: Sampling
    section: str  # for messages
    on_ranks: bool  # whether several share the policy


class CompanionSnapshot(Protocol):
    def save(self, folder: Path) -> None: ...


class Companion(Protocol):
    """Learns alongside the policy. Gradients accumulate until ``step``; files are in its own folder in the policy's."""

    def capturing(self) -> AbstractContextManager[None]:
        """Watch a pass of the policy that trains, inside the context."""
        ...

    def accumulate(self, batch: Batch) -> Metrics:
        """Add the gradient of the micro-batch that the policy has just read."""
        ...

    def drop_gradients(self) -> None: ...

    def step(self) -> Metrics: ...

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that leave the device with the state of training."""
        ...

    def stage(self, *, optimizer: bool) -> CompanionSnapshot:
        """Copy weights, and with ``optimizer`` the state of training, to CPU memory. ``save`` may run while training goes on."""
        ...

    def save(self, folder: Path, *, optimizer: bool = True) -> None: ...

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote. Raises ValueError for a checkpoint without it."""
        ...


class PolicySnapshot(Protocol):
    """A learner at one moment."""

    def save(self, folder: Path, *, optimizer: bool = True) -> None: ...


@dataclass(frozen=True, eq=False)
class StagedWithCompanion:
    """A learner's snapshot, and that of its companion."""

    learner: PolicySnapshot
    companion: CompanionSnapshot

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        self.learner.save(folder, optimizer=optimizer)
        self.companion.save(folder)
