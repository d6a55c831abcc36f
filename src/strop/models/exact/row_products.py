"""Products with a weight in which a row's bits do not depend on how many rows are multiplied with it.

Rows are multiplied in calls of shapes that have the bits of the reference shape (``trusted_shapes``), the rest of the rows padded with
zeros. The backward pass is the ordinary one: gradients are those of the same function, and no bits of theirs are promised.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from strop.models.exact.packed_weights import PackedWeights, multiply_packed, pack_weight
from strop.models.exact.trusted_shapes import SHAPES, ProductKind, RowFunction, in_reference_blocks, round_up_rows

MOST_ROWS = 1024  # of one call
MOST_OPERATIONS = 1 << 32  # multiplications of one call, which bounds what trying its shape costs
PATTERN = 65521  # random numbers that the weight of a trial repeats; a prime, so that rows differ


def exact_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, weights: PackedWeights) -> Tensor:
    """Return inputs [.., K] times weight [N, K] plus bias [N], in the precision of autocast if it is on -> [.., N]. Differentiable."""
    kind = inputs.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.promote_types(inputs.dtype, weight.dtype)
    apply: Any = _RowProduct.apply
    product: Tensor = apply(inputs.reshape(-1, inputs.shape[-1]), weight, bias, weights, dtype)
    return product.view(*inputs.shape[:-1], -1)


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, weights: PackedWeights, dtype: torch.dtype
    ) -> Tensor:
        ctx.row_dtype = rows.dtype
        rows = rows.to(dtype)
        ctx.save_for_backward(rows, weight, bias)
        return multiply_rows(rows, weights.get(weight, dtype), weight.shape[0], None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, weight, bias = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            grad_rows = (grad @ weight.to(grad.dtype)).to(ctx.row_dtype) if ctx.needs_input_grad[0] else None
            grad_weight = (grad.t() @ rows).to(weight.dtype) if ctx.needs_input_grad[1] else None
            grad_bias = grad.sum(0).to(bias.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        return grad_rows, grad_weight, grad_bias, None, None


def multiply_rows(rows: Tensor, packed: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """Return rows [n, K] times a weight of ``pack_weight`` with N = ``outputs``, plus a bias [N] -> [n, N]."""
    inputs = rows.shape[1]
    kind = ProductKind("linear", inputs, outputs, rows.dtype, rows.device, bias is not None)
    most = max(64, min(MOST_ROWS, MOST_OPERATIONS // (inputs * outputs) // 64 * 64))
    results = []
    for part in rows.contiguous().split(most):
        size = min(round_up_rows(len(part)), most)

        def product(block: Tensor) -> Tensor:
            return multiply_packed(block, packed, bias)

        if SHAPES.trusts(kind, (size,), lambda: _trial_product(kind)):
            padded = part if size == len(part) else nn.functional.pad(part, (0, 0, 0, size - len(part)))
            results.append(product(padded)[: len(part)])
        else:
            results.append(in_reference_blocks(product, part, dims=1))
    return results[0] if len(results) == 1 else torch.cat(results) if results else rows.new_zeros(0, outputs)


def _trial_product(kind: ProductKind) -> RowFunction:
    """Return the product with a weight and a bias of random numbers, the same at every call."""
    generator = torch.Generator().manual_seed(kind.outputs)
    pattern = torch.randn(PATTERN, generator=generator)
    count = kind.inputs * kind.outputs
    weight = pattern.repeat(-(-count // PATTERN))[:count].view(kind.outputs, kind.inputs).to(kind.device, kind.dtype)
    bias = weight[:, 0].clone() if kind.details else None
    packed = pack_weight(weight, kind.dtype)
    return lambda rows: multiply_packed(rows, packed, bias)
