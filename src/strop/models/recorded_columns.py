"""What an engine's passes record of the tokens that they read: columns that lie along these (``strop.columns``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from strop.columns import TokenColumn


class ColumnRecorder(Protocol):
    """Records a column in one pass. The decoder is given it as a keyword argument of the column's name."""

    def stack(self) -> Tensor:
        """Return what was recorded of the n tokens of the pass, [n, ...]."""
        ...


class ReplayedColumn(Protocol):
    """Replaces a model's choices in one pass. The decoder is given it as a keyword argument of the column's name."""

    counts: Tensor  # [2]: (token, layer) pairs that differ, compared


Recorders = Mapping[TokenColumn, ColumnRecorder]


class RecordedColumn(Protocol):
    """A column that a network can record."""

    @property
    def column(self) -> TokenColumn: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the entry of one token."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    def record(self) -> ColumnRecorder: ...

    def replay(self, values: Tensor, weights: Tensor) -> ReplayedColumn:
        """Return what replays the values [n, ...] of the tokens of a pass, with the weight of each in the counts [n]."""
        ...


def name_recorders(recorders: Recorders) -> dict[str, Any]:
    """Return the keyword arguments of a decoder that records columns."""
    return {column.name: recorder for column, recorder in recorders.items()}


def stack_columns(recorders: Recorders) -> dict[TokenColumn, Tensor]:
    """Return what was recorded of the n tokens of a pass, [n, ...] each."""
    return {column: recorder.stack() for column, recorder in recorders.items()}


def allocate_columns(columns: Iterable[RecordedColumn], size: tuple[int, ...], device: torch.device) -> dict[TokenColumn, Tensor]:
    """Return memory for the columns of a cache's tokens, [*size, ...] each."""
    return {each.column: torch.zeros((*size, *each.shape), dtype=each.dtype, device=device) for each in columns}
