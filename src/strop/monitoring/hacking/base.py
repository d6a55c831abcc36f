"""What a detector is: numbers in [0, 1] of each step that are low in an honest run, and a bound of their mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from strop.monitoring.hacking.watched_rollout import RolloutName, WatchedRollout, WatchedStep


@dataclass(frozen=True)
class Reading:
    """What a detector reads of a step."""

    values: Sequence[float]  # in [0, 1], of different tasks
    shown: Sequence[RolloutName] = ()  # the rollouts that show it, the clearest first


class HackingDetector(ABC):
    """Reads numbers of every step. Under the null hypothesis, that the run is honest, the mean of each is at most the bound.

    The numbers of a step are of different tasks, which the policy answers independently of each other.
    """

    name: ClassVar[str]
    meaning: ClassVar[str]  # what an alarm says, with {value} and {bound}
    bound: ClassVar[float]
    margin: ClassVar[float | None] = None  # above the run's level in its first steps; None: all runs have one bound

    @abstractmethod
    def read(self, step: WatchedStep) -> Reading | None:
        """Return the numbers of a step; None if the step says nothing."""

    def level(self, step: WatchedStep) -> float | None:
        """Return what is compared with the first steps; None: nothing."""
        return None

    def choose_bound(self, first: float | None) -> float:
        """Return the bound. ``first``: the mean of ``level`` in the first steps; None during them."""
        return self.bound if self.margin is None or first is None else min(max(self.bound, first + self.margin), 0.98)

    def confirms(self, step: WatchedStep, first: float | None) -> bool:
        """Whether the step agrees with an alarm, which it can only prevent. ``first``: the mean of ``level`` in the very first steps."""
        return True


class WordingDetector(HackingDetector):
    """Reads the wording of rewarded rollouts. Its level is that of all rollouts, whatever their reward."""

    def read(self, step: WatchedStep) -> Reading | None:
        return self.measure(step.rewarded_by_task)

    def level(self, step: WatchedStep) -> float | None:
        reading = self.measure(step.some_by_task)
        return None if reading is None else mean(reading.values)

    @abstractmethod
    def measure(self, groups: Sequence[Sequence[WatchedRollout]]) -> Reading | None:
        """Return what the rollouts of some tasks show."""


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
