"""The order of tasks: interleaved sources, and a section of ``data`` that an extension attaches, if it is not the shuffled one.

    stream        0  1  2  3  4  5  6  7  ...
    weights 3:1   A  A  A  B  A  A  A  B  ...      evenly spaced, not random
    within A      its rows, shuffled in every epoch by (seed, source, epoch)

The map is stateless, so a run that resumes at i continues exactly. A source of unknown size keeps its own order: the row is the
position in it, counted over all epochs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import floor
from typing import TYPE_CHECKING, Any, Protocol

from strop.base_config import BaseConfig, iter_sections
from strop.sampling import mix_seed

if TYPE_CHECKING:
    from strop.types import Group


@dataclass(frozen=True, kw_only=True)
class Interleaving:
    """Interleaves the rows of sources by weight. One epoch has as many positions as all sources have rows."""

    sizes: tuple[int | None, ...]  # None: unknown
    weights: tuple[
        float | None, ...
    ]  # each source's share of the stream; all None: proportional to the sizes, which must be known
    seed: int = 0
    shuffle: bool = True
    max_epochs: int | None = None  # None: endless

    def locate(self, index: int) -> tuple[int, int]:
        """Return (source, row) at a position. Raises IndexError outside the epochs."""
        if index < 0 or (self.size is not None and index >= self.size):
            raise IndexError(f"position {index} lies outside the stream: {self.max_epochs} epochs of {self.epoch_size} tasks")
        chosen, position = self._locate_source(index)
        size = self.sizes[chosen]
        if size is None:
            return chosen, position
        epoch, row = divmod(position, size)
        if self.shuffle:
            row = permute_index(row, size, mix_seed(self.seed, chosen, epoch))
        return chosen, row

    @cached_property
    def epoch_size(self) -> int | None:
        """The number of positions of an epoch; None if it is unknown."""
        known = [size for size in self.sizes if size is not None]
        return sum(known) if len(known) == len(self.sizes) else None

    @property
    def size(self) -> int | None:
        """The number of positions of all epochs; None if it is unknown or without a limit."""
        return None if self.max_epochs is None or self.epoch_size is None else self.max_epochs * self.epoch_size

    @cached_property
    def _shares(self) -> tuple[Fraction, ...]:
        """Each source's share of the positions that earlier sources leave, as exact fractions, so that no position is lost."""
        if len(self.sizes) == 1:
            return (Fraction(1),)
        weights = [
            Fraction(str(size if weight is None else weight)) for size, weight in zip(self.sizes, self.weights, strict=True)
        ]
        return tuple(weight / sum(weights[i:]) for i, weight in enumerate(weights))

    def _locate_source(self, index: int) -> tuple[int, int]:
        """Return the source of stream position ``index``, and the number of its earlier positions.

        Each source in turn takes the position or leaves it to the rest. It takes position i if floor((i + 1) share) > floor(i share),
        the even spacing of Beatty (1926).
        """
        for chosen, share in enumerate(self._shares):
            taken = floor(index * share)
            if floor((index + 1) * share) > taken:
                return chosen, taken
            index -= taken
        raise AssertionError("the last share is 1")


def permute_index(index: int, size: int, seed: int) -> int:
    """Return the image of ``index`` under a pseudo-random permutation of range(size), in constant time and memory.

    A Feistel network permutes the next larger power of four; cycle walking (Black and Rogaway 2002), which repeats it until the result
    is in range, makes it a permutation of range(size).
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


class OrderedTasks(Protocol):
    """A mixture of tasks, as a chooser needs it (``strop.environments.mixture.Mixture``)."""

    @property
    def components(self) -> Sequence[Any]: ...

    @property
    def seed(self) -> int: ...

    @property
    def interleaving(self) -> Interleaving: ...


class TaskChooser(Protocol):
    """Chooses the task of each position of a mixture's stream."""

    def locate(self, position: int) -> tuple[int, int]:
        """Return (component, task) at a position. Raises IndexError outside the epochs."""
        ...

    def observe(self, group: Group) -> None:
        """Record the outcome of a group, and add metrics of the choice to its rollouts."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return the state to save in a checkpoint, as JSON values."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        ...


class TaskOrder(BaseConfig):
    """A section of ``data`` (``strop.sections``) that may replace the shuffled order of the training tasks."""

    @property
    def enabled(self) -> bool:
        return False

    def describe(self) -> str:
        """Describe how the tasks are drawn, for the start of a run."""
        return ""

    def make_chooser(
        self, mixture: OrderedTasks, rewards: Mapping[str, Collection[str]], *, slots: int, groups_per_step: int
    ) -> TaskChooser:
        """Make the chooser for a mixture. ``rewards``: the names of each environment's rewards, by alias; ``slots``: those of
        the stream. Raises EnvironmentConfigError, DataError.
        """
        raise NotImplementedError


def find_task_orders(data: BaseConfig) -> Iterator[TaskOrder]:
    """Yield the enabled orders in the section ``data``."""
    return (section for _, section in iter_sections(data) if isinstance(section, TaskOrder) and section.enabled)
