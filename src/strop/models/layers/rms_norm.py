"""RMSNorm (arXiv 1910.07467) as one autograd function: it saves its input and one number per row, and can write bfloat16
directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.layers.known_code import find_form

# Llama's formula, weight * (x / rms(x)), and Gemma's, (1 + weight) * (x / rms(x)).
LLAMA, GEMMA = "llama.LlamaRMSNorm", "gemma.GemmaRMSNorm"


@dataclass(frozen=True)
class RmsNormSpec:
    """The formula of an RMSNorm, apart from its weight."""

    eps: float
    offset: float  # added to the weight: 1 in Gemma
    rounds_first: bool  # Llama rounds x / rms(x) to the dtype of x before it multiplies with the weight; Gemma rounds the product


def rms_norm_spec(module: nn.Module) -> RmsNormSpec | None:
    """Return what an RMSNorm of Transformers computes; None for a module whose code is not that of one."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if eps is None or isinstance(module, nn.LayerNorm) or not isinstance(getattr(module, "weight", None), nn.Parameter):
        return None
    form = find_form(type(module), (LLAMA, GEMMA))
    if form == LLAMA:
        return RmsNormSpec(float(eps), 0.0, True)
    return RmsNormSpec(float(eps), 1.0, False) if form == GEMMA else None


def rms_norm(x: Tensor, weight: Tensor, spec: RmsNormSpec, dtype: torch.dtype) -> Tensor:
    """[..., H] and [H] -> [..., H] in ``dtype``. Computed in float32, or in float64 for an input of that dtype."""
    apply: Any = RmsNorm.apply
    result: Tensor = apply(x, weight, spec, dtype)
    return result


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, spec: RmsNormSpec, dtype: torch.dtype) -> Tensor:
        normed, scale = normalize((spec, dtype), x, weight)
        ctx.save_for_backward(x, scale, weight)
        ctx.spec = spec
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *norm_gradients((ctx.spec, *ctx.needs_input_grad[:2]), grad, *ctx.saved_tensors), None, None


def normalize(constants: tuple[RmsNormSpec, torch.dtype], x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm [..., H] of rows, and what they were multiplied with, [..., 1]."""
    spec, dtype = constants
    wide = _widen(x)
    scale = wide.square().mean(-1, keepdim=True).add_(spec.eps).rsqrt_()
    normed = wide * scale
    if spec.rounds_first and normed.dtype != x.dtype:
        normed = normed.to(x.dtype).to(normed.dtype)
    return normed.mul_(_factor(weight, spec, normed.dtype)).to(dtype), scale


def add_and_normalize(
    constants: tuple[RmsNormSpec, torch.dtype], x: Tensor, added: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of two, and ``normalize`` of it."""
    total = x + added
    return total, *normalize(constants, total, weight)


def norm_gradients(
    constants: tuple[RmsNormSpec, bool, bool], grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, *added: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of rows and weight where they are needed; ``added``: another gradient of the rows."""
    spec, needs_rows, needs_weight = constants
    normed = _widen(x) * scale
    grad = grad.to(normed.dtype)
    weighted = grad * normed  # d weight is its sum over rows; its product with the weight is what x / rms(x) projects out
    factor = _factor(weight, spec, normed.dtype)
    grad_x = None
    if needs_rows:
        # a product would be a kernel of its own in compiled code
        mean = (
            ((weighted * factor).sum(-1) if torch.compiler.is_compiling() else weighted @ factor)
            .unsqueeze(-1)
            .mul_(1 / x.shape[-1])
        )
        grad_x = (grad * factor).addcmul_(normed, mean, value=-1.0).mul_(scale).to(x.dtype)
        for other in added:
            grad_x = grad_x.add_(other)
    return grad_x, weighted.flatten(0, -2).sum(0).to(weight.dtype) if needs_weight else None


def norm_gradients_and_sum(
    constants: tuple[RmsNormSpec, bool, bool, torch.dtype], grad: Tensor, *tensors: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return ``norm_gradients`` of rows that need one, and that of the rows once more in a dtype."""
    *others, dtype = constants
    grad_x, grad_weight = norm_gradients(tuple(others), grad, *tensors)  # type: ignore[arg-type]
    assert grad_x is not None
    return grad_x, grad_weight, grad_x.to(dtype)


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _factor(weight: Tensor, spec: RmsNormSpec, dtype: torch.dtype) -> Tensor:
    factor = weight.to(dtype)
    return factor + spec.offset if spec.offset else factor
