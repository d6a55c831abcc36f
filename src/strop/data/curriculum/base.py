"""The interface of a curriculum: which task of an entry of the data is next, given the results so far.

A curriculum sees results in the order of their positions in the stream, and a result no sooner than it is final for every position that
may depend on it (``strop.data.curriculum.task_chooser``). If it depends on nothing else, and draws from ``Draw.random`` alone, a run is
repeated, and continued from a checkpoint, task by task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A position of the stream that a task is chosen for."""

    position: int
    step: int  # which trains on it, as long as no group is dropped
    usual: int  # the task that comes here without a curriculum
    in_flight: frozenset[int]  # tasks chosen for earlier positions, whose outcome is not known
    random: Random  # seeded by the run's seed and the position


@dataclass(frozen=True)
class Choice:
    """A task by its index, and metrics of the choice, which are logged as ``train/curriculum/NAME``."""

    task: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TaskOutcome:
    """What came of a task. Groups that an algorithm drops because all rewards are equal are outcomes too."""

    task: int
    position: int
    step: int
    scores: tuple[float, ...]  # of the rollouts without an error; empty if the group failed


class Curriculum(ABC):
    """Chooses among the tasks of one entry. One of your own is made as ``Class(tasks=..., **kwargs)``, once for each entry."""

    @abstractmethod
    def choose(self, draw: Draw) -> Choice:
        """Return the task for a position."""

    def observe(self, outcome: TaskOutcome) -> None:
        """Take note of what came of a task that was chosen earlier. Default: nothing."""
        return None

    def state(self) -> Mapping[str, Any]:
        """Return what to save in a checkpoint, as JSON has it. Default: nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. Default: nothing."""
        return None
