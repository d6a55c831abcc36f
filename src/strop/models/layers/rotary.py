"""Rotary position embedding (arXiv 2104.09864) of queries and keys as one autograd function, which keeps nothing but the angles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate [..., T, D] by the angles of [..., T, D], in the dtype of the angles; return ``dtype``.

    As Transformers pairs them: entry i < D / 2 with entry i + D / 2, which have the same angle. Angles need no gradient.
    """
    apply: Any = _Rotate.apply
    rotated: Tensor = apply(x, cos, sin, dtype)
    return rotated


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _turn(x, cos, sin, 1.0).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1.0).to(ctx.dtype), None, None, None  # the other way round


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    half = x.shape[-1] // 2
    turned = wide * cos
    turned[..., :half].sub_(wide[..., half:] * sin[..., :half], alpha=sign)  # rounds the product first, as Transformers does
    turned[..., half:].add_(wide[..., :half] * sin[..., half:], alpha=sign)
    return turned
