"""Attention computed in parts that are merged by the log-sum-exp of their scores; and its gradient.

A part is attention to some of the keys: an output and, for each query and head, the logarithm of the sum of the exponentials of its scores
(lse). The merged output weighs each part by exp(lse). In the backward pass each part uses the total lse and output, which makes
its gradients those of the whole, independently of the other parts (FlashAttention, arXiv 2205.14135; RingAttention, arXiv 2310.01889).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from strop.device_copies import is_gpu
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.attention.tree_pieces import Levels
from strop.packages import is_here
from strop.sampling import at_least_float32

Gradients = tuple[Tensor, Tensor, Tensor]


class PieceKernel(Protocol):
    """Computes pieces of attention. Rows: query [T, heads, D], key [S, kv_heads, D], value [S, kv_heads, V]."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, levels: Levels, spec: AttentionSpec, *, final: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the output [T, heads, V] and lse [T, heads], in float32 or float64; 0 and -inf for a query without a key.

        ``final``: nothing is added to the output, which may then be in the rows' dtype.
        """
        ...

    def backward(
        self, rows: Gradients, output: Tensor, lse: Tensor, grad: Tensor, levels: Levels, spec: AttentionSpec, *, final: bool
    ) -> Gradients:
        """Return the gradients of ``rows`` (query, key, value), in float32 or float64, or if ``final`` in the rows' dtype.

        ``output`` and ``grad`` [T, heads, V] in the rows' dtype and ``lse`` [T, heads] belong to the whole attention.
        """
        ...


def merge_part(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part into an output [T, heads, V] and lse [T, heads], in place. Parts without keys have the lse -inf."""
    total = torch.logaddexp(lse, part_lse)
    known = total.clamp(min=torch.finfo(total.dtype).min)  # -inf minus -inf is NaN
    output.mul_((lse - known).exp_().unsqueeze(-1)).add_(part * (part_lse - known).exp_().unsqueeze(-1))
    lse.copy_(total)


def merge_rows(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | slice) -> None:
    """Merge a part [n, heads, V] with its lse [heads, n] into these rows of an output [T, heads, V] and lse [heads, T], in place.

    One kernel on a GPU with Triton. The sum is rounded once, to the dtype of ``output``.
    """
    if is_gpu(output.device) and _has_triton():
        from strop.models.attention import merge_kernel

        return merge_kernel.merge_rows_on_gpu(output, lse, part, part_lse, rows)
    return merge_rows_by_operators(output, lse, part, part_lse, rows)


def merge_rows_by_operators(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | slice) -> None:
    """``merge_rows`` where there is no Triton."""
    merged, total = at_least_float32(output[rows]), lse.t()[rows]
    merge_part(merged, total, part, part_lse.t())
    output[rows], lse.t()[rows] = merged.to(output.dtype), total


@cache
def _has_triton() -> bool:
    return is_here("triton")


def weigh_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Include a score without a value per head, ``sinks`` [heads], in an output [T, heads, V] and lse [T, heads]."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return output * (lse - total).exp().unsqueeze(-1), total


def sink_gradient(output: Tensor, lse: Tensor, grad: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient [heads] of sinks from the total output, lse and the output's gradient."""
    weight = (sinks.to(lse.dtype) - lse).exp()
    return -(weight * (output.to(lse.dtype) * grad.to(lse.dtype)).sum(-1)).sum(0).to(sinks.dtype)


class _PieceAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        kernel: PieceKernel,
        levels: Levels,
        spec: AttentionSpec,
    ) -> Tensor:
        output, lse = kernel.forward(query, key, value, levels, spec, final=sinks is None)
        if sinks is not None:
            output, lse = weigh_sinks(output, lse, sinks)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse, sinks)
        ctx.kernel, ctx.levels, ctx.spec = kernel, levels, spec
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, sinks = ctx.saved_tensors
        rows = (query, key, value)
        grads = ctx.kernel.backward(rows, output, lse, grad.contiguous(), ctx.levels, ctx.spec, final=True)
        own = None if sinks is None else sink_gradient(output, lse, grad, sinks)
        return *(one.to(row.dtype) for one, row in zip(grads, rows, strict=True)), own, None, None, None


def attend_in_pieces(
    query: Tensor, key: Tensor, value: Tensor, kernel: PieceKernel, levels: Levels, spec: AttentionSpec
) -> Tensor:
    """Attention [T, heads, D] x [T, kv_heads, D] -> [T, heads, V] in pieces, with the sinks of ``spec``."""
    apply: Any = _PieceAttention.apply
    output: Tensor = apply(query, key, value, spec.sinks, kernel, levels, spec)
    return output
