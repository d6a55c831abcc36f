"""Moving rows of a tensor, without the accumulation of ``index_select``'s backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _MoveRows(torch.autograd.Function):
    """Take the rows ``source``, or put rows at the indices ``target`` of ``size`` rows of zeros. Indices do not repeat.

    Each operation is the backward pass of the other: a plain copy, while the backward pass of ``index_select`` accumulates.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor | None, target: Tensor | None, size: int | None = None) -> Tensor:
        ctx.source, ctx.target, ctx.size = source, target, len(rows)
        return _take_rows(rows, source) if source is not None else _put_rows(rows, target, size or len(rows))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        moved = _put_rows(grad, ctx.source, ctx.size) if ctx.source is not None else _take_rows(grad, ctx.target)
        return moved, None, None, None


def move_rows(rows: Tensor, source: Tensor | None, target: Tensor | None, size: int | None = None) -> Tensor:
    apply: Any = _MoveRows.apply
    moved: Tensor = apply(rows, source, target, size)
    return moved


def _take_rows(rows: Tensor, index: Tensor) -> Tensor:
    return rows.index_select(0, index)


def _put_rows(rows: Tensor, index: Tensor | None, size: int) -> Tensor:
    assert index is not None
    return rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, index, rows)
