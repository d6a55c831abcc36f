"""The fused operations of a decoder layer as autograd functions: products that share an input, gated activations, rotary embeddings, norms.

An RMSNorm (arXiv 1910.07467) saves its input and one number per row, and can write bfloat16 directly.

A decoder layer with Llama's code as two nodes of the gradient's graph, one before attention and one after it, in place of a dozen.

A node runs the autograd functions of fused layers one after the other: values, roundings, gradients and what is saved are theirs. It saves
the host the calls of modules, views and nodes, which is what a layer takes where a GPU is faster than the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.models.layers.known_code import RmsNormSpec
from strop.models.layers.segments import run_segment
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


@dataclass(frozen=True, eq=False)
class BeforeAttention:
    """How to compute queries, keys and values from hidden states."""

    norm: RmsNormSpec
    head_norms: Sequence[RmsNormSpec]  # of queries and keys; or none
    head_norm_dtype: torch.dtype
    weights: LinearWeights
    head_dim: int
    dtype: torch.dtype  # of the products
    rotated_dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class AfterAttention:
    """How to compute a layer's output from that of attention."""

    norm: RmsNormSpec
    weights: Sequence[LinearWeights]  # of the output's projection, gate and up, down
    parameters: Sequence[int]  # numbers of them
    activation: str
    dtype: torch.dtype  # of the products


class _Tape:
    """Stands for the ``ctx`` of an autograd function that runs inside of another one."""

    def __init__(self, *needs: bool) -> None:
        self.needs_input_grad = needs
        self.saved_tensors: tuple[Tensor, ...] = ()
        self.saved = 0
        self.constants: Any = None

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors, self.saved = tensors, len(tensors)


def _save(ctx: Any, *tapes: _Tape) -> None:
    """Let ``ctx`` save what the tapes hold, so that hooks on saved tensors (recomputation, offload) see it."""
    ctx.tapes = tapes
    ctx.save_for_backward(*(tensor for tape in tapes for tensor in tape.saved_tensors))
    for tape in tapes:
        tape.saved_tensors = ()


def _restore(ctx: Any) -> Sequence[Any]:
    """Return tapes with what ``ctx`` saved; those of ``ctx`` stay empty."""
    saved, restored = iter(ctx.saved_tensors), []
    for tape in ctx.tapes:
        twin = _Tape.__new__(_Tape)
        twin.__dict__.update(tape.__dict__, saved_tensors=tuple(islice(saved, tape.saved)))
        restored.append(twin)
    return restored


def _normalize(tape: _Tape, x: Tensor, weight: Tensor, spec: RmsNormSpec, dtype: torch.dtype) -> Tensor:
    normed: Tensor
    normed, scale = run_segment(normalize, (spec, dtype), x, weight)
    tape.save_for_backward(x, scale, weight)
    tape.constants = spec
    return normed


def _norm_gradients(tape: Any, grad: Tensor) -> tuple[Any, Tensor | None]:
    """Return the gradients of the rows and of the weight."""
    constants = (tape.constants, *tape.needs_input_grad)
    of_rows, of_weight = run_segment(norm_gradients, constants, grad, *tape.saved_tensors)
    return of_rows, of_weight


_products_backward: Any = JoinedLinear.backward  # the gradient of the input is always asked for


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, part: BeforeAttention, norm: Tensor, head_norms: int, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        needs = ctx.needs_input_grad
        products = parameters[head_norms:]
        tapes = [_Tape(needs[0], needs[4]), _Tape(True, False, False, *needs[6 + head_norms :])]
        rows = _normalize(tapes[0], x.view(-1, x.shape[-1]), norm, part.norm, part.dtype)
        heads = [
            row.view(len(row), -1, part.head_dim) for row in JoinedLinear.forward(tapes[1], rows, part.weights, 3, *products)
        ]
        for place, spec in enumerate(part.head_norms):
            tapes.append(_Tape(True, needs[6 + place]))
            heads[place] = _normalize(tapes[-1], heads[place], parameters[place], spec, part.head_norm_dtype)
        angles = _Tape()
        angles.save_for_backward(cos, sin)
        ctx.turned = tuple(head.dtype for head in heads[:2])
        heads[:2] = run_segment(turn, (1.0, (part.rotated_dtype,) * 2), cos, sin, *heads[:2])
        _save(ctx, *tapes, angles)
        ctx.shape, ctx.parameters = x.shape, len(parameters)
        return tuple(heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        norm, product, *head_norms, angles = _restore(ctx)
        arriving = [*run_segment(turn, (-1.0, ctx.turned), *angles.saved_tensors, *grads[:2]), grads[2]]
        of_norms: list[Tensor | None] = []
        for place, tape in enumerate(head_norms):
            arriving[place], own = _norm_gradients(tape, arriving[place])
            of_norms.append(own)
        rows, _, _, *of_weights = _products_backward(product, *(grad.flatten(1) for grad in arriving))
        of_x, of_norm = _norm_gradients(norm, rows)
        of_x = None if of_x is None else of_x.view(ctx.shape)
        return of_x, None, None, None, of_norm, None, *of_norms, *of_weights


class _After(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, attended: Tensor, part: AfterAttention, norm: Tensor, *parameters: Tensor) -> Tensor:
        needs = ctx.needs_input_grad
        products, tapes, place = iter(parameters), [], 4
        for count in part.parameters:
            tapes.append(_Tape(True, False, False, *needs[place : place + count]))
            place += count
        weights = [tuple(islice(products, count)) for count in part.parameters]
        normed, activated = _Tape(True, needs[3]), _Tape()
        (projected,) = JoinedLinear.forward(tapes[0], attended.flatten(1).to(part.dtype), part.weights[0], 1, *weights[0])
        hidden, rows, scale = run_segment(add_and_normalize, (part.norm, part.dtype), x.view(-1, x.shape[-1]), projected, norm)
        normed.save_for_backward(hidden, scale, norm)
        normed.constants = part.norm
        gate, up = JoinedLinear.forward(tapes[1], rows, part.weights[1], 2, *weights[1])
        inner, active = run_segment(activate_and_multiply, part.activation, gate, up)
        activated.save_for_backward(gate, up, active)
        (down,) = JoinedLinear.forward(tapes[2], inner, part.weights[2], 1, *weights[2])
        _save(ctx, *tapes, normed, activated)
        ctx.dtype, ctx.activation = part.dtype, part.activation
        ctx.attended = (attended.shape, attended.dtype)
        output: Tensor = hidden + down
        return output.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        projection, gates, downs, normed, activated = _restore(ctx)
        arriving = grad.reshape(-1, grad.shape[-1])
        inner, _, _, *of_down = _products_backward(downs, arriving.to(ctx.dtype))
        gate, up = run_segment(gated_gradients, ctx.activation, inner, *activated.saved_tensors)
        rows, _, _, *of_gates = _products_backward(gates, gate, up)
        constants = (normed.constants, *normed.needs_input_grad, ctx.dtype)
        of_hidden, of_norm, arriving = run_segment(norm_gradients_and_sum, constants, rows, *normed.saved_tensors, arriving)
        of_rows, _, _, *of_projection = _products_backward(projection, arriving)
        shape, dtype = ctx.attended
        weights = (*of_projection, *of_gates, *of_down)
        return of_hidden.view(grad.shape), of_rows.view(shape).to(dtype), None, of_norm, *weights


def before_attention(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    part: BeforeAttention,
    norm: Tensor,
    head_norms: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """[1, T, H], and angles [T, 1, D] -> query [T, heads, D], key and value [T, kv_heads, D].

    ``parameters``: of the three linear layers whose weights ``part`` has; gradients go to them.
    """
    apply: Any = _Before.apply
    rows: tuple[Tensor, Tensor, Tensor] = apply(x, cos, sin, part, norm, len(head_norms), *head_norms, *parameters)
    return rows


def after_attention(x: Tensor, attended: Tensor, part: AfterAttention, norm: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """A layer's input [1, T, H] and its attention [T, heads, D] -> its output [1, T, H]."""
    apply: Any = _After.apply
    output: Tensor = apply(x, attended, part, norm, *parameters)
    return output
