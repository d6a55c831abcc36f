"""The configured hyperparameters of an optimizer and its schedule, which a restored state must not overwrite."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


@dataclass(frozen=True, eq=False)
class Hyperparameters:
    """Options of each parameter group (learning rate, weight decay, betas, ...) and the schedule, before the first step.

    A saved state has the hyperparameters of the run that saved it; a resumed run uses its own configuration.
    """

    groups: list[dict[str, Any]]
    schedule: Mapping[str, Any] | None

    @classmethod
    def of(cls, optimizer: Optimizer, scheduler: LRScheduler | None) -> Hyperparameters:
        """Copy the hyperparameters of an optimizer and a scheduler before their first step."""
        options = {*inspect.signature(type(optimizer)).parameters, "initial_lr"} - {"params"}  # other keys are state
        groups = [{key: value for key, value in group.items() if key in options} for group in optimizer.param_groups]
        return cls(copy.deepcopy(groups), None if scheduler is None else copy.deepcopy(scheduler.state_dict()))

    def replace_in(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved state of the optimizer with these options in its groups."""
        groups = [{**saved, **own} for saved, own in zip(state["param_groups"], copy.deepcopy(self.groups), strict=True)]
        return {**state, "param_groups": groups}

    def advance(self, scheduler: LRScheduler, steps: int) -> None:
        """Set the scheduler and its optimizer to their state after ``steps`` steps, as if this schedule had been used from the
        start.

        The groups of the optimizer must have these options.
        """
        assert self.schedule is not None
        scheduler.load_state_dict(dict(copy.deepcopy(self.schedule)))
        for group, own in zip(scheduler.optimizer.param_groups, self.groups, strict=True):
            group["lr"] = copy.deepcopy(own["lr"])
        with warnings.catch_warnings(action="ignore"):  # no optimizer step precedes these
            for _ in range(steps):
                scheduler.step()


def count_schedule_steps(schedule: Mapping[str, Any] | None, optimizer: Mapping[str, Any]) -> int:
    """Return the number of steps of a saved schedule; without one, the number counted by the optimizer, if it does."""
    if schedule is not None:
        return int(schedule["last_epoch"])
    return max((int(values["step"]) for values in optimizer["state"].values() if "step" in values), default=0)
