"""Several environments in one run: which task stands at position i of the stream, from i alone (strop.data.placement)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from strop.data.placement import Placement
from strop.environments.base import Environment, EnvironmentConfigError
from strop.types import Task


class TaskSource(Protocol):
    """Where a run's stream of tasks comes from."""

    def __len__(self) -> int:
        """Tasks of one epoch."""
        ...

    def at(self, index: int) -> tuple[str, Environment[Any], Task]:
        """The environment's name, the environment and the task at ``index``; IndexError after the last epoch."""
        ...


@dataclass(frozen=True)
class Component:
    name: str
    environment: Environment[Any]
    tasks: Sequence[Task]
    weight: float | None = None  # its share of the stream; None in all: each has as many as it has tasks


@dataclass(frozen=True)
class Mixture:
    """Tasks of the components by weight. One epoch has as many tasks as all components together."""

    components: tuple[Component, ...]
    seed: int = 0
    shuffle: bool = True
    max_epochs: int | None = None  # None: without end

    def __post_init__(self) -> None:
        weights = [component.weight for component in self.components]
        if not self.components:
            raise EnvironmentConfigError("there is no environment to take tasks from")
        for component in self.components:
            if len(component.tasks) == 0:
                raise EnvironmentConfigError(f"the environment {component.name} has no tasks")
        if None in weights and any(weight is not None for weight in weights):
            raise EnvironmentConfigError(f"some environments have a weight and some do not ({weights}); give each one or none")
        if any(weight is not None and not 0 < weight < float("inf") for weight in weights):
            raise EnvironmentConfigError(f"the weights of the environments are {weights}; each must be positive")

    def __len__(self) -> int:
        return sum(len(component.tasks) for component in self.components)

    @property
    def size(self) -> int | None:
        """Tasks of all epochs; None without end."""
        return None if self.max_epochs is None else self.max_epochs * len(self)

    def at(self, index: int) -> tuple[str, Environment[Any], Task]:
        chosen, place = self._placement.at(index)
        component = self.components[chosen]
        return component.name, component.environment, component.tasks[place]

    @cached_property
    def _placement(self) -> Placement:
        return Placement(
            sizes=tuple(len(component.tasks) for component in self.components),
            weights=tuple(component.weight for component in self.components),
            seed=self.seed,
            shuffle=self.shuffle,
            max_epochs=self.max_epochs,
        )
