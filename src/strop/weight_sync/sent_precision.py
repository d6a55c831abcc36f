"""The precision of published weights: the learner's, rounded to the number format that rollouts are sampled with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor


class SentPrecision(Protocol):
    """How the weights of a publish are quantised, and where."""

    @property
    def by_engine(self) -> bool:
        """Whether the engine quantises what arrives, in its own kernels' layout; else it is sent values that are rounded already."""
        ...

    def select(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names of weights that are quantised, of all names of a publish."""
        ...

    def round(self, tensor: Tensor) -> Tensor:
        """Return a selected weight as the engine computes with it, in its own data type."""
        ...
