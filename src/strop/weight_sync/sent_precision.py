"""The precision of published weights: the learner's, rounded to the number format that rollouts are sampled with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class SentPrecision(Protocol):
    """How the weights of a publish are quantised, and where."""

    @property
    def by_engine(self) -> bool:
        """Whether the engine quantises what arrives, in its own kernels' layout; else it is sent values that are rounded already."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The data type that the engine computes in: weights are cast to it before they are quantised."""
        ...

    def packed_size(self, name: str, shape: Sequence[int]) -> int | None:
        """Return the bytes of a selected weight that is sent quantised; None: it is sent as numbers."""
        ...

    def pack(self, tensor: Tensor) -> Tensor:
        """Return the values and scales of a selected weight as bytes, [bytes] uint8."""
        ...

    def select(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names of weights that are quantised, of all names of a publish."""
        ...

    def round(self, tensor: Tensor) -> Tensor:
        """Return a selected weight as the engine computes with it, in its own data type."""
        ...
