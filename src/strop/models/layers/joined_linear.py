"""Linear layers with the same input, as one autograd function that saves the input once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.models.layers.weight_copies import LinearWeights


def are_plain(linears: Sequence[object]) -> bool:
    """Return whether the modules are ordinary linear layers: without adapters, hooks, shards or another ``forward``."""
    return all(
        type(linear) is nn.Linear
        and "forward" not in linear.__dict__
        and not linear._forward_pre_hooks
        and not linear._forward_hooks
        and not isinstance(linear.weight, DTensor)
        and (linear.bias is None) == (linears[0].bias is None)  # type: ignore[attr-defined]
        for linear in linears
    )


def joined_linear(x: Tensor, linears: Sequence[nn.Linear], weights: LinearWeights) -> tuple[Tensor, ...]:
    """[T, K] -> [T, N] of each layer. ``weights`` are those of ``linears`` in the dtype of ``x``; the gradients go to ``linears``."""
    parameters = [linear.weight for linear in linears]
    if linears[0].bias is not None:
        parameters += [linear.bias for linear in linears]
    apply: Any = _JoinedLinear.apply
    outputs: tuple[Tensor, ...] = apply(x, weights, len(linears), *parameters)
    return outputs


class _JoinedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: LinearWeights, count: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x)
        ctx.weights = weights
        ctx.count = count
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        return weights.project(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        weights: LinearWeights = ctx.weights
        needed, count = ctx.needs_input_grad, ctx.count
        columns = weights.join_columns(grads)
        grad_x = weights.project_back(columns) if needed[0] else None
        gradients: list[Tensor | None] = [None] * len(ctx.dtypes)
        if any(needed[3 : 3 + count]):
            gradients[:count] = weights.gradients(x, columns)
        if any(needed[3 + count :]):
            gradients[count:] = [grad.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
        typed = (None if grad is None else grad.to(dtype) for grad, dtype in zip(gradients, ctx.dtypes, strict=True))
        return grad_x, None, None, *typed
