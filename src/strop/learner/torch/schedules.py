"""Learning-rate schedules by name: a warm-up followed by a shape, as a factor of each parameter group's learning rate.

A step is one ``scheduler_unit``; the factor at step t (from 0) applies during that step. With W warm-up steps it is (t + 1) / W
for t < W, so that no step is wasted at a rate of 0, and it is 1 at t = W - 1 and t = W. With ``warmup_init_ratio`` r the warm-up
begins there instead: r + (1 - r) t / W, and 1 from t = W. A decay reaches its final factor at t = total_steps, one step after the last
one, and stays there.

``transformers.get_scheduler`` has the same shapes, but its warm-ups begin at a rate of 0, only cosine and wsd have a minimum
ratio, and rounding affects where a cycle restarts. So the formulas are here, and torch's ``LambdaLR`` applies them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from strop.lazy_torch import torch
from strop.user_code import suggest_names

# The arguments of each schedule besides those of the warm-up and total_steps.
SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "constant": (),
    "linear": ("min_ratio",),
    "cosine": ("min_ratio",),  # arXiv 1608.03983
    "cosine_with_restarts": ("min_ratio", "cycles"),  # arXiv 1608.03983
    "polynomial": ("min_ratio", "power"),
    "inverse_sqrt": ("timescale", "min_ratio"),  # arXiv 1706.03762
    "wsd": ("decay_steps", "decay_ratio", "min_ratio", "decay"),  # warm-up, stable, decay: arXiv 2404.06395
}
COMMON_ARGUMENTS = ("warmup_steps", "warmup_ratio", "warmup_init_ratio", "total_steps")

# Shapes of a decay that fall from 1 to 0, given its progress from 0 to 1.
DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "sqrt": lambda progress: 1 - math.sqrt(progress),  # arXiv 2405.18392
    "exponential": lambda progress: 2 * 0.5**progress - 1,
}


def _option(default: Any, kind: type, low: float, high: float = math.inf) -> Any:
    """Return a field for an integer or a number in [low, high], or null if null is the default."""
    return field(default=default, metadata={"kind": kind, "low": low, "high": high})


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A named schedule and its arguments. Raises ValueError whose message begins with the name of the wrong argument."""

    name: str
    warmup_steps: int | None = _option(None, int, 0)  # null: warmup_ratio decides, otherwise no warm-up
    warmup_ratio: float | None = _option(None, float, 0, 1)  # of total_steps, rounded to whole steps
    warmup_init_ratio: float | None = _option(None, float, 0, 1)  # the factor at step 0; null: 1 / warmup_steps
    total_steps: int | None = _option(None, int, 1)
    timescale: int | None = _option(None, int, 1)  # steps; null: the length of the warm-up, or 10,000 without one
    decay_steps: int | None = _option(None, int, 1)
    decay_ratio: float | None = _option(None, float, 0, 1)  # of total_steps; 0.1 if neither is set
    min_ratio: float = _option(0.0, float, 0, 1)
    cycles: int = _option(1, int, 1)  # cosine decays, each restarting from the full rate
    power: float = _option(1.0, float, 0)
    decay: str = "linear"  # one of DECAYS

    def __post_init__(self) -> None:
        for item in fields(self):
            _check_option(item.name, getattr(self, item.name), item.metadata, null=item.default is None)
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError(
                f"warmup_ratio: found {self.warmup_ratio}, but warmup_steps={self.warmup_steps} is set too; remove one of them"
            )
        if self.warmup_ratio is not None:
            self.require_total_steps("warmup_ratio is a fraction of it")
        if self.name == "wsd":
            self._check_wsd()
        elif self.name not in ("constant", "inverse_sqrt") and self.decay_length < 1:
            raise ValueError(
                f"warmup_steps: found a warm-up of {self.warmup} steps, but total_steps is {self.total_steps}, which leaves no steps "
                "for the decay; set a shorter warm-up, or a larger total_steps"
            )

    def _check_wsd(self) -> None:
        if self.decay not in DECAYS:
            raise ValueError(f"decay: found {self.decay!r}{suggest_names(str(self.decay), DECAYS)}")
        if self.decay_steps is not None and self.decay_ratio is not None:
            raise ValueError(
                f"decay_ratio: found {self.decay_ratio}, but decay_steps={self.decay_steps} is set too; remove one of them"
            )
        total = self.require_total_steps("the decay ends there")
        if self.warmup + self.decay_length > total:
            raise ValueError(
                f"decay_steps: a warm-up of {self.warmup} steps and a decay of {self.decay_length} steps exceed "
                f"total_steps={total}; shorten one of them, or set a larger total_steps"
            )

    @property
    def warmup(self) -> int:
        """Number of steps of the warm-up."""
        if self.warmup_ratio is not None:
            return round(self.warmup_ratio * self.require_total_steps("warmup_ratio is a fraction of it"))
        return self.warmup_steps or 0

    @property
    def decay_length(self) -> int:
        """Number of steps of the decay: all after the warm-up, or for wsd the last ones."""
        total = self.require_total_steps("the decay ends there")
        if self.name != "wsd":
            return total - self.warmup
        return self.decay_steps or max(1, round((0.1 if self.decay_ratio is None else self.decay_ratio) * total))

    def ratio(self, step: int) -> float:
        """Return the factor of the learning rates at ``step``, from 0."""
        if step < self.warmup:
            first = self.warmup_init_ratio
            return (step + 1) / self.warmup if first is None else first + (1 - first) * step / self.warmup
        if self.name == "constant":
            return 1.0
        if self.name == "inverse_sqrt":
            timescale = self.timescale or self.warmup or 10_000
            return max(self.min_ratio, math.sqrt(timescale / (timescale + step - self.warmup)))
        steps = self.decay_length
        elapsed = max(step + steps - self.require_total_steps("the decay ends there"), 0)
        return self.min_ratio + (1 - self.min_ratio) * (self._shape(elapsed, steps) if elapsed < steps else 0.0)

    def _shape(self, step: int, steps: int) -> float:
        """Return the shape of the decay, which falls from 1 at ``step`` 0 to 0 at ``steps``."""
        match self.name:
            case "polynomial":
                return float((1 - step / steps) ** self.power)
            case "cosine_with_restarts":  # in integers: a quotient could round at a restart
                return DECAYS["cosine"](step * self.cycles % steps / steps)
            case "wsd":
                return DECAYS[self.decay](step / steps)
            case _:
                return DECAYS[self.name](step / steps)

    def require_total_steps(self, reason: str) -> int:
        if self.total_steps is None:
            raise ValueError(
                f"total_steps: found null, and the number of optimizer steps of this run is unknown, but {reason}; "
                "set total_steps to the number of optimizer steps after which the schedule ends"
            )
        return self.total_steps


def make_schedule(name: str, kwargs: Mapping[str, Any], *, total_steps: int | None = None, section: str = "policy") -> Schedule:
    """Create a schedule by name. ``total_steps`` is the run's number of steps, the default of the schedule's own.

    Raises ValueError with the key and, for an unknown name, the closest known one.
    """
    if name not in SCHEDULES:
        raise ValueError(
            f"{section}.scheduler.name: there is no schedule {name!r}{suggest_names(name, SCHEDULES)}; "
            "write a class like torch.optim.lr_scheduler.LinearLR"
        )
    known = (*COMMON_ARGUMENTS, *SCHEDULES[name])
    for key in kwargs:
        if key not in known:
            raise ValueError(f"{section}.scheduler.kwargs.{key}: {name} has no such argument{suggest_names(key, known)}")
    arguments = {"name": name, **kwargs}
    if arguments.get("total_steps") is None:
        arguments["total_steps"] = total_steps
    try:
        return Schedule(**arguments)
    except ValueError as error:
        raise ValueError(f"{section}.scheduler.kwargs.{error}") from error


def make_lr_scheduler(schedule: Schedule, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Apply a schedule to an optimizer's parameter groups.

    The saved state has the step but not the arguments: a resumed run uses its own configuration, for example another
    ``total_steps``.
    """
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule.ratio(step))


def _check_option(name: str, value: Any, limits: Mapping[str, Any], *, null: bool) -> None:
    """Raises ValueError for a value of another type than the option, or outside of its range."""
    if not limits or (value is None and null):
        return
    kind, low, high = limits["kind"], limits["low"], limits["high"]
    numbers = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, numbers) or not low <= value <= high:
        what = "a whole number" if kind is int else "a number"
        limit = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        raise ValueError(f"{name}: found {value!r}; it must be {what} {limit}" + (", or null" if null else ""))
