"""The precision of published weights: the learner's, rounded to the number format used for sampling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class SentPrecision(Protocol):
    """How and where the weights of a publish are quantised."""

    @property
    def by_engine(self) -> bool:
        """Whether the engine quantises arriving weights into its own kernels' layout; otherwise it receives rounded values."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The compute data type of the engine; weights are cast to it before they are quantised."""
        ...

    def packed_size(self, name: str, shape: Sequence[int]) -> int | None:
        """Return the size in bytes of a selected weight that is sent quantised; None: it is sent as numbers."""
        ...

    def pack(self, tensor: Tensor) -> Tensor:
        """Return the values and scales of a selected weight as bytes, [bytes] uint8."""
        ...

    def select(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names of the weights to quantise, given all names of a publish."""
        ...

    def round(self, tensor: Tensor) -> Tensor:
        """Return a selected weight as rounded by the engine, in its own data type."""
        ...
