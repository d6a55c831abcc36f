"""Several environments in one run: which task stands at position i of the stream, from i alone.

    stream        0  1  2  3  4  5  6  7  ...
    weights 3:1   A  A  A  B  A  A  A  B  ...      spread evenly, without randomness
    within A      its tasks, shuffled anew every epoch by (seed, component, epoch)

No state is kept: a run that resumes at i goes on exactly as it would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import floor
from typing import Any, Protocol

from strop.environments.base import Environment, EnvironmentConfigError
from strop.sampling import mix_seed
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

    def at(self, index: int) -> tuple[str, Environment[Any], Task]:
        if index < 0 or (self.max_epochs is not None and index >= self.max_epochs * len(self)):
            raise IndexError(f"position {index} lies outside the stream: {self.max_epochs} epochs of {len(self)} tasks")
        chosen, position = self._place(index)
        component = self.components[chosen]
        epoch, place = divmod(position, len(component.tasks))
        if self.shuffle:
            place = permuted(place, len(component.tasks), mix_seed(self.seed, chosen, epoch))
        return component.name, component.environment, component.tasks[place]

    @cached_property
    def _shares(self) -> tuple[Fraction, ...]:
        """Each component's share of what the components before it left over; exact, so that no position is lost."""
        weights = [Fraction(str(len(item.tasks) if item.weight is None else item.weight)) for item in self.components]
        return tuple(weight / sum(weights[i:]) for i, weight in enumerate(weights))

    def _place(self, index: int) -> tuple[int, int]:
        """Which component has stream position ``index``, and how many of its tasks came before.

        Component by component, ask whether it takes the position or leaves it to the rest. The first takes position i
        when floor((i + 1) share) exceeds floor(i share): the even spread of Beatty (1926).
        """
        for chosen, share in enumerate(self._shares):
            before = floor(index * share)
            if floor((index + 1) * share) > before:
                return chosen, before
            index -= before
        raise AssertionError("the last share is 1")


def permuted(index: int, size: int, seed: int) -> int:
    """Where a pseudo-random permutation of range(size) sends ``index``, in constant time and memory.

    A Feistel network permutes the next larger square of a power of two; walking on until the result is in range
    (Black and Rogaway 2002) makes it a permutation of the range.
    """
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << bits) - 1
    while True:
        left, right = index >> bits, index & mask
        for round_number in range(4):
            left, right = right, left ^ (mix_seed(seed, round_number, right) & mask)
        index = left << bits | right
        if index < size:
            return index
