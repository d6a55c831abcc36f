"""Several sources in one stream: which row of which source stands at position i, from i alone.

    stream        0  1  2  3  4  5  6  7  ...
    weights 3:1   A  A  A  B  A  A  A  B  ...      spread evenly, without randomness
    within A      its rows, shuffled anew every epoch by (seed, source, epoch)

No state is kept: a run that resumes at i goes on exactly as it would have.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import floor

from strop.sampling import mix_seed


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Rows of sources of the given sizes, by weight. One epoch has as many positions as all sources have rows."""

    sizes: tuple[int, ...]
    weights: tuple[float | None, ...]  # each source's share of the stream; None in all: each has as many as it has rows
    seed: int = 0
    shuffle: bool = True
    max_epochs: int | None = None  # None: without end

    def at(self, index: int) -> tuple[int, int]:
        """(source, row) at a position. Raises IndexError outside the epochs."""
        if index < 0 or (self.max_epochs is not None and index >= self.max_epochs * sum(self.sizes)):
            raise IndexError(f"position {index} lies outside the stream: {self.max_epochs} epochs of {sum(self.sizes)} tasks")
        chosen, position = self._place(index)
        epoch, row = divmod(position, self.sizes[chosen])
        if self.shuffle:
            row = permuted(row, self.sizes[chosen], mix_seed(self.seed, chosen, epoch))
        return chosen, row

    @cached_property
    def _shares(self) -> tuple[Fraction, ...]:
        """Each component's share of what the components before it left over; exact, so that no position is lost."""
        weights = [
            Fraction(str(size if weight is None else weight)) for size, weight in zip(self.sizes, self.weights, strict=True)
        ]
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
