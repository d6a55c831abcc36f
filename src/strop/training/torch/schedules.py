"""Learning-rate schedules by name: warm-up, then a shape, as a ratio to the rate of each parameter group.

The ratio of step t (from 0) is what optimizer step t + 1 is taken with. With W steps of warm-up it is (t + 1) / W for t < W, so that
no step is wasted at a rate of 0, and the whole rate at t = W - 1 and t = W. What decays reaches its last ratio at t = total_steps,
one step after the end, and stays there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from strop.data.errors import nearest


def _option(default: Any, kind: type, low: float, high: float = math.inf) -> Any:
    """A field that is a whole number or a number of [low, high], or null where null is the default."""
    return field(default=default, metadata={"kind": kind, "low": low, "high": high})


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """Fields are the arguments a configuration may give. Raises ValueError, beginning with the argument's name, for a wrong one."""

    warmup_steps: int | None = _option(None, int, 0)  # null: from warmup_ratio, else no warm-up
    warmup_ratio: float | None = _option(None, float, 0, 1)  # of total_steps, rounded to whole steps
    total_steps: int | None = _option(None, int, 1)

    def __post_init__(self) -> None:
        for item in fields(self):
            _check(item.name, getattr(self, item.name), item.metadata, null=item.default is None)
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError(
                f"warmup_ratio: found {self.warmup_ratio}, and warmup_steps={self.warmup_steps} too; leave one of them out"
            )
        if self.warmup_ratio is not None:
            self.require_total("warmup_ratio is a share of it")

    @abstractmethod
    def after_warmup(self, step: int) -> float:
        """The ratio ``step`` optimizer steps after the warm-up, from 0."""

    @property
    def warmup(self) -> int:
        """Optimizer steps of warm-up."""
        if self.warmup_ratio is not None:
            return round(self.warmup_ratio * self.require_total("warmup_ratio is a share of it"))
        return self.warmup_steps or 0

    def ratio(self, step: int) -> float:
        """What the rates are multiplied by at ``step``, from 0."""
        warmup = self.warmup
        return (step + 1) / warmup if step < warmup else self.after_warmup(step - warmup)

    def require_total(self, reason: str) -> int:
        if self.total_steps is None:
            raise ValueError(
                f"total_steps: found null, and how many optimizer steps the schedule has is not known here, but {reason}; "
                "set total_steps to the number of optimizer steps after which it ends"
            )
        return self.total_steps


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """Warm-up, then the whole rate."""

    def after_warmup(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Decay(Schedule):
    """Warm-up, then a decay over all steps that are left: m + (1 - m) shape, with m = min_ratio."""

    min_ratio: float = _option(0.0, float, 0, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        total = self.require_total("the rate decays until then")
        if self.warmup >= total:
            raise ValueError(
                f"warmup_steps: found a warm-up of {self.warmup} steps, but total_steps is {total}, which leaves none to decay over; "
                "set a shorter warm-up, or a larger total_steps"
            )

    @abstractmethod
    def shape(self, step: int, steps: int) -> float:
        """From 1 at ``step`` 0 towards 0 at ``steps``."""

    def after_warmup(self, step: int) -> float:
        steps = self.require_total("the rate decays until then") - self.warmup
        shape = self.shape(step, steps) if step < steps else 0.0
        return self.min_ratio + (1 - self.min_ratio) * shape


@dataclass(frozen=True, kw_only=True)
class Linear(Decay):
    """A straight line."""

    def shape(self, step: int, steps: int) -> float:
        return 1 - step / steps


@dataclass(frozen=True, kw_only=True)
class Cosine(Decay):
    """Half a period of a cosine (arXiv 1608.03983)."""

    def shape(self, step: int, steps: int) -> float:
        return _half_cosine(step / steps)


@dataclass(frozen=True, kw_only=True)
class CosineWithRestarts(Decay):
    """As many half periods, each from the whole rate again (arXiv 1608.03983)."""

    cycles: int = _option(1, int, 1)

    def shape(self, step: int, steps: int) -> float:
        return _half_cosine(step * self.cycles % steps / steps)


@dataclass(frozen=True, kw_only=True)
class Polynomial(Decay):
    """(1 - t / steps) ^ power."""

    power: float = _option(1.0, float, 0)

    def shape(self, step: int, steps: int) -> float:
        return float((1 - step / steps) ** self.power)


@dataclass(frozen=True, kw_only=True)
class InverseSqrt(Schedule):
    """Warm-up, then sqrt(timescale / (timescale + t)), without an end (arXiv 1706.03762)."""

    timescale: int | None = _option(None, int, 1)  # steps; null: those of the warm-up, or 10,000 where there is none
    min_ratio: float = _option(0.0, float, 0, 1)

    def after_warmup(self, step: int) -> float:
        timescale = self.timescale or self.warmup or 10_000
        return max(self.min_ratio, math.sqrt(timescale / (timescale + step)))


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(Schedule):
    """Warm-up, the whole rate, and a decay over the last steps (arXiv 2404.06395)."""

    decay_steps: int | None = _option(None, int, 1)
    decay_ratio: float | None = _option(None, float, 0, 1)  # of total_steps; where neither is given, 0.1
    min_ratio: float = _option(0.0, float, 0, 1)
    decay: str = "linear"  # linear, cosine, or sqrt: 1 - sqrt(t / steps) (arXiv 2405.18392)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay not in DECAYS:
            raise ValueError(f"decay: found {self.decay!r}{nearest(str(self.decay), DECAYS)}")
        if self.decay_steps is not None and self.decay_ratio is not None:
            raise ValueError(
                f"decay_ratio: found {self.decay_ratio}, and decay_steps={self.decay_steps} too; leave one of them out"
            )
        total = self.require_total("the decay ends then")
        if self.warmup + self.decay_length > total:
            raise ValueError(
                f"decay_steps: a warm-up of {self.warmup} steps and a decay of {self.decay_length} are more than "
                f"total_steps={total}; shorten either, or set a larger total_steps"
            )

    @property
    def decay_length(self) -> int:
        """Optimizer steps of the decay."""
        if self.decay_steps is not None:
            return self.decay_steps
        ratio = 0.1 if self.decay_ratio is None else self.decay_ratio
        return max(1, round(ratio * self.require_total("the decay ends then")))

    def after_warmup(self, step: int) -> float:
        steps = self.decay_length
        begun = step + self.warmup - (self.require_total("the decay ends then") - steps)
        shape = DECAYS[self.decay](min(max(begun, 0), steps) / steps)
        return self.min_ratio + (1 - self.min_ratio) * shape


def _half_cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def _line(progress: float) -> float:
    return 1 - progress


def _one_minus_sqrt(progress: float) -> float:
    return 1 - math.sqrt(progress)


DECAYS: Mapping[str, Callable[[float], float]] = {"linear": _line, "cosine": _half_cosine, "sqrt": _one_minus_sqrt}

SCHEDULES: Mapping[str, type[Schedule]] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "cosine_with_restarts": CosineWithRestarts,
    "polynomial": Polynomial,
    "inverse_sqrt": InverseSqrt,
    "wsd": WarmupStableDecay,
}


def make_schedule(name: str, kwargs: Mapping[str, Any], *, total_steps: int | None = None, section: str = "policy") -> Schedule:
    """A schedule by name. ``total_steps`` is the run's number of optimizer steps, for a schedule that is not given its own.

    Raises ValueError naming the key and, for a name that is not known, the nearest one.
    """
    if name not in SCHEDULES:
        raise ValueError(
            f"{section}.scheduler.name: there is no schedule {name!r}{nearest(name, SCHEDULES)}; "
            "a class is written like torch.optim.lr_scheduler.LinearLR"
        )
    kind = SCHEDULES[name]
    known = [item.name for item in fields(kind)]
    for key in kwargs:
        if key not in known:
            raise ValueError(f"{section}.scheduler.kwargs.{key}: {name} has no such argument{nearest(key, known)}")
    given = dict(kwargs)
    if given.get("total_steps") is None:
        given["total_steps"] = total_steps
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{section}.scheduler.kwargs.{error}") from error


def follow(schedule: Schedule, optimizer: Optimizer) -> LambdaLR:
    """The schedule on an optimizer's groups.

    Its saved state has the step and not the arguments: a run that is resumed follows the configuration in force, such as another
    ``total_steps``.
    """
    return LambdaLR(optimizer, lambda step: schedule.ratio(step))


def _check(name: str, value: Any, limits: Mapping[str, Any], *, null: bool) -> None:
    """Raises ValueError for a value that is not of the option's kind, or not in its range."""
    if not limits or (value is None and null):
        return
    kind, low, high = limits["kind"], limits["low"], limits["high"]
    numbers = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, numbers) or not low <= value <= high:
        what = "a whole number" if kind is int else "a number"
        limit = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        raise ValueError(f"{name}: found {value!r}; it must be {what} {limit}" + (", or null" if null else ""))
