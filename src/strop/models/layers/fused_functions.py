"""The fused operations of a decoder layer as autograd functions: products that share an input, gated activations, rotary embeddings, norms.

An RMSNorm (arXiv 1910.07467) saves its input and one number per row, and can write bfloat16 directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.models.layers.known_code import RmsNormSpec
from strop.models.layers.weight_copies import LinearWeights

SILU, GELU_TANH, GELU = "silu", "tanh", "none"  # the last two as the argument ``approximate`` of torch's GELU


def joined_linear(x: Tensor, linears: Sequence[nn.Linear], weights: LinearWeights) -> tuple[Tensor, ...]:
    """[T, K] -> [T, N] of each layer. ``weights`` are those of ``linears`` in the dtype of ``x``; the gradients go to ``linears``."""
    apply: Any = JoinedLinear.apply
    outputs: tuple[Tensor, ...] = apply(x, weights, len(linears), *linear_parameters(linears))
    return outputs


def linear_parameters(linears: Sequence[nn.Linear]) -> list[Tensor]:
    """Return the weights of linear layers, and then their biases, if they have some."""
    parameters: list[Tensor] = [linear.weight for linear in linears]
    return parameters + [linear.bias for linear in linears] if linears[0].bias is not None else parameters


class JoinedLinear(torch.autograd.Function):
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
            gradients[:count] = weights.gradients(x, columns, ctx.dtypes[0])
        if any(needed[3 + count :]):
            gradients[count:] = [grad.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
        typed = (None if grad is None else grad.to(dtype) for grad, dtype in zip(gradients, ctx.dtypes, strict=True))
        return grad_x, None, None, *typed


def gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """activation(gate) * up, as SwiGLU and GeGLU (arXiv 2002.05202): [T, I] and [T, I] -> [T, I], with the roundings of both operators."""
    apply: Any = GatedActivation.apply
    result: Tensor = apply(gate, up, kind)
    return result


class GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        product, activated = activate_and_multiply(kind, gate, up)
        ctx.save_for_backward(gate, up, activated)
        ctx.kind = kind
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *gated_gradients(ctx.kind, grad, *ctx.saved_tensors), None


def activate_and_multiply(kind: str, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    activated = _activate(gate, kind)
    return activated * up, activated


def gated_gradients(kind: str, grad: Tensor, gate: Tensor, up: Tensor, activated: Tensor) -> tuple[Tensor, Tensor]:
    outer = grad * up
    if kind == SILU:
        return torch.ops.aten.silu_backward(outer, gate), activated * grad
    return torch.ops.aten.gelu_backward(outer, gate, approximate=kind), activated * grad


def _activate(gate: Tensor, kind: str) -> Tensor:
    return F.silu(gate) if kind == SILU else F.gelu(gate, approximate=kind)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) that saves only the angles: rotate [..., T, D] by those of [..., T, D].

    Computed in the dtype of the angles, which need no gradient; returns ``dtype``. As in Transformers, entry i < D / 2 is paired
    with entry i + D / 2, which has the same angle.
    """
    apply: Any = Rotate.apply
    rotated: Tensor = apply(x, cos, sin, dtype)
    return rotated


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return turn((1.0, (dtype,)), cos, sin, x)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return *turn((-1.0, (ctx.dtype,)), cos, sin, grad), None, None, None  # the other way round


def turn(constants: tuple[float, tuple[torch.dtype, ...]], cos: Tensor, sin: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """Rotate each part [..., D] by the angles, or with the sign -1 back. ``constants``: sign, and the dtype of each result."""
    sign, dtypes = constants
    return tuple(_turn(part, cos, sin, sign).to(dtype) for part, dtype in zip(parts, dtypes, strict=True))


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    half = x.shape[-1] // 2
    turned = wide * cos
    turned[..., :half].sub_(wide[..., half:] * sin[..., :half], alpha=sign)  # rounds the product first, as Transformers does
    turned[..., half:].add_(wide[..., :half] * sin[..., half:], alpha=sign)
    return turned


def rms_norm(x: Tensor, weight: Tensor, spec: RmsNormSpec, dtype: torch.dtype) -> Tensor:
    """[..., H] and [H] -> [..., H] in ``dtype``. Computed in float32, or in float64 for an input of that dtype."""
    apply: Any = _RmsNorm.apply
    result: Tensor = apply(x, weight, spec, dtype)
    return result


class _RmsNorm(torch.autograd.Function):
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
