"""Training state in a checkpoint, in addition to the weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from strop.learner.torch.master_weights import MasterWeights
from strop.learner.torch.optimizer import Hyperparameters, ScheduleUnit, count_schedule_steps, load_optimizer
from strop.learner.torch.weight_average import AveragedWeights

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingState:
    """The optimizer, its schedule, the float32 masters of low-precision weights and the average of the weights.

    A parallelism saves it with the weights, in its own format: ``SingleDevice`` the ``state_dict``, ``Sharded`` the shards of each tensor.
    """

    trainable_parameters: Sequence[tuple[str, nn.Parameter]]  # of the module: plain tensors on this rank
    masters: MasterWeights
    optimizer: Optimizer
    scheduler: LRScheduler | None
    average: AveragedWeights | None
    configured: Hyperparameters  # of this run, regardless of the run that saved a state
    schedule_unit: ScheduleUnit = field(default_factory=ScheduleUnit)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of the state except the module's own parameters."""
        nested: list[Any] = [self.masters.copies, self.optimizer.state, self.average and self.average.state_dict()]
        while nested:
            match nested.pop():
                case Tensor() as tensor:
                    yield tensor
                case Mapping() as mapping:
                    nested += mapping.values()
                case list() | tuple() as values:
                    nested += values

    def state_dict(self) -> dict[str, Any]:
        return {
            "masters": self.masters.state_dict(),
            "average": self.average.state_dict() if self.average else None,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.schedule_state(),
        }

    def schedule_state(self) -> dict[str, Any] | None:
        return {**self.scheduler.state_dict(), "unit": self.schedule_unit.state_dict()} if self.scheduler else None

    def load_state_dict(self, state: Mapping[str, Any], path: Path) -> None:
        """Restore a ``state_dict`` that was read from ``path``. Raises ValueError if its parameters differ."""
        self.masters.load_state_dict(state.get("masters", {}))
        self.load_optimizer(state["optimizer"])
        self.load_scheduler(state["scheduler"], state["optimizer"])
        self.load_average(state.get("average"), path)

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the optimizer, with this run's hyperparameters. Raises ValueError if it has other parameters or groups."""
        load_optimizer(self.optimizer, state, self.configured)

    def load_scheduler(self, state: Mapping[str, Any] | None, optimizer: Mapping[str, Any]) -> None:
        """Set this run's schedule to the step of a saved one, and with it the learning rates."""
        if self.scheduler is not None:
            unit = state.get("unit") if state is not None else None
            steps = self.schedule_unit.convert(count_schedule_steps(state, optimizer), unit)
            self.configured.advance(self.scheduler, steps)

    def load_average(self, state: Mapping[str, Any] | None, path: Path) -> None:
        """Restore the state of the average, if this run has one; without a saved state restart it, with a warning."""
        if self.average is None:
            return
        if state is not None:
            self.average.load_state_dict(state)
            return
        log.warning("%s has no average of the weights (policy.ema): it restarts from the weights of this checkpoint", path)
        self.average.reset()
