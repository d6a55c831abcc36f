"""Outputs of many rows, computed a chunk of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import repeat

import torch
from torch import Tensor

from strop.algorithms.base import TokenOutputs


def map_chunks(
    compute: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, ...]],
    hidden: Tensor,
    target: Tensor,
    chunk: int,
    candidates: Tensor | None,
    kept: Tensor | None,
    *,
    squared_probs: bool,
) -> TokenOutputs:
    """Return the outputs of all rows, computed ``chunk`` rows at a time: the columns returned by ``compute``, joined."""
    outputs = [
        compute(*rows)
        for rows in zip(
            hidden.split(chunk),
            target.split(chunk),
            _split_optional(candidates, chunk),
            _split_optional(kept, chunk),
            strict=False,
        )
    ]
    columns = [torch.cat(column) for column in zip(*outputs, strict=True)]
    squares = columns.pop() if squared_probs else None
    return replace(TokenOutputs(*columns), log_sum_sq_probs=squares)


def _split_optional(column: Tensor | None, chunk: int) -> Iterable[Tensor | None]:
    return repeat(None) if column is None else column.split(chunk)
