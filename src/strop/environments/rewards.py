"""Rewards of an environment: marked methods or functions, and how they count: gates, and weights that change from step to step."""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, TypeVar

from strop.types import Rollout, StepReward


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A reward is computed only if the reward ``reward`` is at least ``at_least``; otherwise it is ``otherwise``."""

    reward: str
    at_least: float = 1.0
    otherwise: float | None = 0.0  # None: the rollout does not get the reward at all
    multiply: bool = False  # the reward is multiplied by the gate's reward

    def opens(self, rewards: Mapping[str, float]) -> bool:
        """Return whether the gate is open; a reward that the rollout lacks opens nothing."""
        return self.reward in rewards and rewards[self.reward] >= self.at_least


def find_closed_gate(gates: Sequence[Gate], rewards: Mapping[str, float]) -> Gate | None:
    return next((gate for gate in gates if not gate.opens(rewards)), None)


def multiply_gates(gates: Sequence[Gate], rewards: Mapping[str, float]) -> float:
    """Return the product of the factors of open gates."""
    factor = 1.0
    for gate in gates:
        factor *= rewards[gate.reward] if gate.multiply else 1.0
    return factor


def sort_by_gates(gates: Mapping[str, Sequence[Gate]]) -> list[str]:
    """Return the names of rewards in their order, but each after the rewards of its gates. Raises ValueError for a cycle."""
    ordered: dict[str, None] = {}

    def place(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise ValueError(
                f"the gates of the rewards form a cycle: {' -> '.join((*path[path.index(name) :], name))}; remove one"
            )
        if name not in ordered:
            for gate in gates[name]:
                place(gate.reward, (*path, name))
            ordered[name] = None

    for name in gates:
        place(name, ())
    return list(ordered)


@dataclass(frozen=True)
class WeightSchedule:
    """A weight by step: as given at the steps of ``points``, constant before the first and after the last, and interpolated by
    ``kind`` in between.
    """

    kind: Literal["linear", "cosine", "steps"]  # steps: the weight of the previous point
    points: tuple[tuple[int, float], ...]  # (step, weight), steps ascending

    def at(self, step: int) -> float:
        after = bisect_right([start for start, _ in self.points], step)
        if after == 0:
            return self.points[0][1]
        if after == len(self.points) or self.kind == "steps":
            return self.points[after - 1][1]
        (start, first), (end, second) = self.points[after - 1], self.points[after]
        share = (step - start) / (end - start)
        if self.kind == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return first + share * (second - first)


MethodT = TypeVar("MethodT", bound=Callable[..., Any])


class RewardError(Exception):
    """A reward method raised an exception, or returned something other than a finite number. The message names the environment
    and the method.
    """


@dataclass(frozen=True)
class RewardMark:
    weight: float = 1.0
    accuracy: bool = False
    group: bool = False  # called once for all rollouts of a task
    per_turn: bool = False  # a process reward: one value per policy turn
    schedule: WeightSchedule | None = None  # weights by step, instead of ``weight``
    gates: tuple[Gate, ...] = ()  # all must open
    log_weighted: bool = False  # also logged as the metric ``weighted/NAME``
    concurrent: bool = False  # may run in parallel with others, because it shares no state with them
    role: str = ""  # of the environment's roles, the only one that earns it; empty: each of them


@dataclass(frozen=True)
class RewardFunction:
    """A reward of an environment: ``function(task, rollout)``, or ``function(task, rollouts)`` if it is a group's."""

    function: Callable[[Any, Any], Any]
    mark: RewardMark
    source: str  # where it is defined, for messages


def reward(
    weight: float = 1.0, *, accuracy: bool = False, group: bool | None = None, per_turn: bool = False, role: str = ""
) -> Callable[[MethodT], MethodT]:
    """Mark a method ``(self, task, rollout) -> float | bool``, sync or async, as a reward that is logged under its name.

    The rollout's reward is the weighted sum of its rewards; a reward of weight 0 is only logged. Evaluation reports the reward
    marked ``accuracy=True`` as accuracy. With ``group`` the method is called once for all rollouts of a task, as
    ``(self, task, rollouts) -> Sequence[float | bool]``; None: if it has a parameter ``rollouts``. A plain function that is a reward
    (``strop.environments.function_environment``) may be marked too.

    With ``per_turn`` it is a process reward, ``(self, task, rollout) -> Sequence``, with one item for each of ``rollout.policy_turns``:
    a number, None for no reward, or for steps inside the turn a mapping from the index of a step's last token in the turn to a number. The
    sum over all steps is the rollout's reward of that name; algorithms that give credit to tokens see each step
    (``strop.algorithms.policy_gradient.turns``).

    In an environment with roles, a reward is computed for each role's rollouts, which differ in ``rollout.role``; with ``role`` only for
    that role's.
    """
    if callable(weight):
        raise TypeError("write @reward() or @reward(weight=...), with parentheses")

    def mark(method: MethodT) -> MethodT:
        of_group = takes_rollouts(method) if group is None else group
        if of_group and per_turn:
            raise TypeError("a reward is for a group or per_turn, not both: a per_turn reward sees one rollout")
        method.__reward__ = RewardMark(weight, accuracy, of_group, per_turn, role=role)  # type: ignore[attr-defined]
        return method

    return mark


def reward_marks(kind: type) -> dict[str, RewardMark]:
    """Return the rewards of an environment class in definition order, parents first."""
    names = dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base))
    marks = ((name, getattr(getattr(kind, name, None), "__reward__", None)) for name in names)
    return {name: mark for name, mark in marks if isinstance(mark, RewardMark)}


@dataclass(frozen=True)
class RewardResult:
    reward: float  # the weighted sum of ``rewards``
    rewards: Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the rollout, checked
    step_rewards: tuple[StepReward, ...] = ()  # the parts of ``reward`` that belong to steps
    turn_states: tuple[str | None, ...] = ()  # one per policy turn, or empty
    unscored: bool = False  # a reward returned None, so the rollout is left out everywhere


def is_earned(each: RewardFunction, rollout: Rollout) -> bool:
    """Return whether the role whose turns these are can earn a reward."""
    return each.mark.role in ("", rollout.role)


def to_number(value: Any) -> float | None:
    """Return a finite number, a bool, or an array or tensor of one element as a float; None for anything else."""
    try:
        item = value.item() if hasattr(value, "item") else value
        number = float(item) if isinstance(item, Real) else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):  # several elements, or an integer larger than any float
        return None
    return number if math.isfinite(number) else None


def is_finite(value: Any) -> bool:
    return to_number(value) is not None


def takes_rollouts(function: Callable[..., Any]) -> bool:
    """Whether a reward has a parameter ``rollouts``, and so needs all rollouts of a task."""
    return "rollouts" in inspect.signature(function).parameters
