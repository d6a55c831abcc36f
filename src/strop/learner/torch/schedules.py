"""Learning-rate schedules by name: a warm-up followed by a shape, as a factor of each parameter group's learning rate.

The factor at step t (from 0) applies to optimizer step t + 1. With W warm-up steps it is (t + 1) / W for t < W, so that no step is
wasted at a rate of 0, and it is 1 at t = W - 1 and t = W. A decay reaches its final factor at t = total_steps, one step after the last
one, and stays there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from strop.data.sources.records import suggest_names


def _option(default: Any, kind: type, low: float, high: float = math.inf) -> Any:
    """Return a field for an integer or a number in [low, high], or null if null is the default."""
    return field(default=default, metadata={"kind": kind, "low": low, "high": high})


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """Fields are the arguments of a configuration. Raises ValueError whose message begins with the name of the wrong argument."""

    warmup_steps: int | None = _option(None, int, 0)  # null: warmup_ratio decides, else no warm-up
    warmup_ratio: float | None = _option(None, float, 0, 1)  # of total_steps, rounded to whole steps
    total_steps: int | None = _option(None, int, 1)

    def __post_init__(self) -> None:
        for item in fields(self):
            _check_option(item.name, getattr(self, item.name), item.metadata, null=item.default is None)
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError(
                f"warmup_ratio: found {self.warmup_ratio}, but warmup_steps={self.warmup_steps} is set too; remove one of them"
            )
        if self.warmup_ratio is not None:
            self.require_total_steps("warmup_ratio is a fraction of it")

    @abstractmethod
    def after_warmup(self, step: int) -> float:
        """Return the factor ``step`` optimizer steps after the warm-up, from 0."""

    @property
    def warmup(self) -> int:
        """Number of optimizer steps of the warm-up."""
        if self.warmup_ratio is not None:
            return round(self.warmup_ratio * self.require_total_steps("warmup_ratio is a fraction of it"))
        return self.warmup_steps or 0

    def ratio(self, step: int) -> float:
        """Return the factor of the learning rates at ``step``, from 0."""
        warmup = self.warmup
        return (step + 1) / warmup if step < warmup else self.after_warmup(step - warmup)

    def require_total_steps(self, reason: str) -> int:
        if self.total_steps is None:
            raise ValueError(
                f"total_steps: found null, and the number of optimizer steps of this run is unknown, but {reason}; "
                "set total_steps to the number of optimizer steps after which the schedule ends"
            )
        return self.total_steps


@dataclass(frozen=True, kw_only=True)
class ConstantSchedule(Schedule):
    """Warm-up, then a constant rate."""

    def after_warmup(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class DecaySchedule(Schedule):
    """Warm-up, then a decay over all remaining steps: m + (1 - m) * shape, with m = min_ratio."""

    min_ratio: float = _option(0.0, float, 0, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        total = self.require_total_steps("the decay ends there")
        if self.warmup >= total:
            raise ValueError(
                f"warmup_steps: found a warm-up of {self.warmup} steps, but total_steps is {total}, which leaves no steps for the decay; "
                "set a shorter warm-up, or a larger total_steps"
            )

    @abstractmethod
    def shape(self, step: int, steps: int) -> float:
        """Return the shape, which falls from 1 at ``step`` 0 to 0 at ``steps``."""

    def after_warmup(self, step: int) -> float:
        steps = self.require_total_steps("the decay ends there") - self.warmup
        shape = self.shape(step, steps) if step < steps else 0.0
        return self.min_ratio + (1 - self.min_ratio) * shape


@dataclass(frozen=True, kw_only=True)
class LinearSchedule(DecaySchedule):
    """A linear decay."""

    def shape(self, step: int, steps: int) -> float:
        return 1 - step / steps


@dataclass(frozen=True, kw_only=True)
class CosineSchedule(DecaySchedule):
    """A cosine decay over half a period (arXiv 1608.03983)."""

    def shape(self, step: int, steps: int) -> float:
        return _half_cosine(step / steps)


@dataclass(frozen=True, kw_only=True)
class CosineWithRestartsSchedule(DecaySchedule):
    """``cycles`` cosine decays, each restarting from the full rate (arXiv 1608.03983)."""

    cycles: int = _option(1, int, 1)

    def shape(self, step: int, steps: int) -> float:
        return _half_cosine(step * self.cycles % steps / steps)


@dataclass(frozen=True, kw_only=True)
class PolynomialSchedule(DecaySchedule):
    """(1 - t / steps) ^ power."""

    power: float = _option(1.0, float, 0)

    def shape(self, step: int, steps: int) -> float:
        return float((1 - step / steps) ** self.power)


@dataclass(frozen=True, kw_only=True)
class InverseSqrtSchedule(Schedule):
    """Warm-up, then sqrt(timescale / (timescale + t)), without a last step (arXiv 1706.03762)."""

    timescale: int | None = _option(None, int, 1)  # steps; null: the length of the warm-up, or 10,000 without one
    min_ratio: float = _option(0.0, float, 0, 1)

    def after_warmup(self, step: int) -> float:
        timescale = self.timescale or self.warmup or 10_000
        return max(self.min_ratio, math.sqrt(timescale / (timescale + step)))


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecaySchedule(Schedule):
    """Warm-up, a constant rate, and a decay over the last steps (arXiv 2404.06395)."""

    decay_steps: int | None = _option(None, int, 1)
    decay_ratio: float | None = _option(None, float, 0, 1)  # of total_steps; 0.1 if neither is set
    min_ratio: float = _option(0.0, float, 0, 1)
    decay: str = "linear"  # linear, cosine, or sqrt: 1 - sqrt(t / steps) (arXiv 2405.18392)

    def __post_init__(self) -> None:
        super().__post_init__()
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
    def decay_length(self) -> int:
        """Number of optimizer steps of the decay."""
        if self.decay_steps is not None:
            return self.decay_steps
        ratio = 0.1 if self.decay_ratio is None else self.decay_ratio
        return max(1, round(ratio * self.require_total_steps("the decay ends there")))

    def after_warmup(self, step: int) -> float:
        steps = self.decay_length
        elapsed = step + self.warmup - (self.require_total_steps("the decay ends there") - steps)
        shape = DECAYS[self.decay](min(max(elapsed, 0), steps) / steps)
        return self.min_ratio + (1 - self.min_ratio) * shape


def _half_cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": _half_cosine,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}

SCHEDULES: Mapping[str, type[Schedule]] = {
    "constant": ConstantSchedule,
    "linear": LinearSchedule,
    "cosine": CosineSchedule,
    "cosine_with_restarts": CosineWithRestartsSchedule,
    "polynomial": PolynomialSchedule,
    "inverse_sqrt": InverseSqrtSchedule,
    "wsd": WarmupStableDecaySchedule,
}


def make_schedule(name: str, kwargs: Mapping[str, Any], *, total_steps: int | None = None, section: str = "policy") -> Schedule:
    """Create a schedule by name. ``total_steps`` is the run's number of optimizer steps, the default of the schedule's own.

    Raises ValueError with the key and, for an unknown name, the closest known one.
    """
    if name not in SCHEDULES:
        raise ValueError(
            f"{section}.scheduler.name: there is no schedule {name!r}{suggest_names(name, SCHEDULES)}; "
            "write a class like torch.optim.lr_scheduler.LinearLR"
        )
    kind = SCHEDULES[name]
    known = [item.name for item in fields(kind)]
    for key in kwargs:
        if key not in known:
            raise ValueError(f"{section}.scheduler.kwargs.{key}: {name} has no such argument{suggest_names(key, known)}")
    arguments = dict(kwargs)
    if arguments.get("total_steps") is None:
        arguments["total_steps"] = total_steps
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ValueError(f"{section}.scheduler.kwargs.{error}") from error


def make_lr_scheduler(schedule: Schedule, optimizer: Optimizer) -> LambdaLR:
    """Apply a schedule to an optimizer's parameter groups.

    The saved state has the step but not the arguments: a resumed run follows its own configuration, such as another ``total_steps``.
    """
    return LambdaLR(optimizer, lambda step: schedule.ratio(step))


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
