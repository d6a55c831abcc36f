"""The interface of a curriculum, which chooses the next task of a data entry from the results so far.

A curriculum receives results in stream order, and only once they are final for every position that may depend on them
(``strop.extensions.curriculum.task_chooser``). If it depends on nothing else and draws only from ``Draw.random``, a repeated or resumed
run gets exactly the same tasks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A position of the stream for which a task is chosen."""

    position: int
    step: int  # the training step of this position, as long as no group is dropped
    usual: int  # the task at this position without a curriculum
    in_flight: frozenset[int]  # tasks chosen for earlier positions whose outcome is still unknown
    random: Random  # seeded by the run's seed and the position


@dataclass(frozen=True)
class Choice:
    """A task by its index, and metrics of the choice, which are logged as ``train/curriculum/NAME``."""

    task: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TaskOutcome:
    """The result of a task. Groups that an algorithm drops because all rewards are equal count too."""

    task: int
    position: int
    step: int
    scores: tuple[float, ...]  # scores of rollouts without errors; empty if the group failed


class Curriculum(ABC):
    """Chooses among the tasks of one entry. A custom class is created as ``Class(tasks=..., **kwargs)``, once per entry."""

    @abstractmethod
    def choose(self, draw: Draw) -> Choice:
        """Return the task for a position."""

    def observe(self, outcome: TaskOutcome) -> None:
        """Record the outcome of a task chosen earlier. Default: nothing."""
        return None

    def state(self) -> Mapping[str, Any]:
        """Return the state to save in a checkpoint, as JSON values. Default: nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. Default: nothing."""
        return None
