"""SwiGLU and GeGLU (arXiv 2002.05202) as one autograd function: activation(gate) * up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SILU, GELU_TANH, GELU = "silu", "tanh", "none"  # the last two as the argument ``approximate`` of torch's GELU


def activation_kind(module: object) -> str | None:
    """Return the kind of an activation of Transformers; None for one that is not known."""
    name = type(module).__name__
    if isinstance(module, nn.SiLU) or name == "SiLUActivation":
        return SILU
    if isinstance(module, nn.GELU):
        return module.approximate
    if name == "GELUTanh" and getattr(module, "act", None) is not None:
        return GELU_TANH
    return None


def gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """[T, I] and [T, I] -> [T, I], with the roundings of the two operators."""
    apply: Any = _GatedActivation.apply
    result: Tensor = apply(gate, up, kind)
    return result


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        activated = _activate(gate, kind)
        ctx.save_for_backward(gate, up, activated)
        ctx.kind = kind
        return activated * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gate, up, activated = ctx.saved_tensors
        grad_up = activated * grad
        outer = grad * up
        if ctx.kind == SILU:
            return torch.ops.aten.silu_backward(outer, gate), grad_up, None
        return torch.ops.aten.gelu_backward(outer, gate, approximate=ctx.kind), grad_up, None


def _activate(gate: Tensor, kind: str) -> Tensor:
    return F.silu(gate) if kind == SILU else F.gelu(gate, approximate=kind)
