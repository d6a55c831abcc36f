"""The fused operations of a decoder layer as autograd functions: products that share an input, gated activations, rotary embeddings, norms.

An RMSNorm (arXiv 1910.07467) saves its input and one number per row, and can write bfloat16 directly.

A decoder layer with Llama's code as two nodes of the gradient's graph, one before attention and one after it, in place of a dozen.

A node runs the autograd functions of fused layers one after the other: values, roundings, gradients and what is saved are theirs. It saves
the host the calls of modules, views and nodes, which is what a layer takes where a GPU is faster than the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
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
        needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:])
        of_x, *gradients = linear_gradients(ctx.weights, ctx.dtypes, needs, x, grads)
        return of_x, None, None, *gradients


def linear_gradients(
    weights: LinearWeights, dtypes: Sequence[torch.dtype], needs: Sequence[bool], x: Tensor, grads: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of the input [T, K] and of the parameters, in their ``dtypes``, which ``needs`` asks for."""
    count = len(grads)
    columns = weights.join_columns(grads)
    of_x = weights.project_back(columns) if needs[0] else None
    gradients: list[Tensor | None] = [None] * len(dtypes)
    if any(needs[1 : 1 + count]):
        gradients[:count] = weights.gradients(x, columns, dtypes[0])
    if any(needs[1 + count :]):
        gradients[count:] = [grad.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
    return [of_x, *(None if grad is None else grad.to(dtype) for grad, dtype in zip(gradients, dtypes, strict=True))]


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


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _factor(weight: Tensor, spec: RmsNormSpec, dtype: torch.dtype) -> Tensor:
    factor = weight.to(dtype)
    return factor + spec.offset if spec.offset else factor


@dataclass(frozen=True)
class BeforeAttention:
    """How to compute queries, keys and values from hidden states."""

    norm: RmsNormSpec
    head_norms: tuple[RmsNormSpec, ...]  # of queries and keys; or none
    head_norm_dtype: torch.dtype
    head_dim: int
    dtype: torch.dtype  # of the products
    rotated_dtype: torch.dtype


@dataclass(frozen=True)
class AfterAttention:
    """How to compute a layer's output from that of attention."""

    norm: RmsNormSpec
    activation: str
    dtype: torch.dtype  # of the products


def compute_heads(
    part: BeforeAttention,
    weights: Sequence[LinearWeights],
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: Tensor,
    *head_norms: Tensor,
) -> Sequence[Tensor]:
    """Return query, key and value, and what their gradients need: the normed rows and their scale; heads and scales of ``head_norms``."""
    rows, scale = normalize((part.norm, part.dtype), x, norm)
    heads = [row.view(len(row), -1, part.head_dim) for row in weights[0].project(rows)]
    inner = []
    for place, (spec, weight) in enumerate(zip(part.head_norms, head_norms, strict=True)):
        normed, of_head = normalize((spec, part.head_norm_dtype), heads[place], weight)
        inner += [heads[place], of_head]
        heads[place] = normed
    return *turn((1.0, (part.rotated_dtype,) * 2), cos, sin, *heads[:2]), heads[2], rows, scale, *inner


def head_gradients(
    constants: tuple[BeforeAttention, Sequence[bool], Sequence[torch.dtype]], weights: Sequence[LinearWeights], *tensors: Tensor
) -> Sequence[Tensor | None]:
    """Return the gradients of ``compute_heads``: of x, the norm, those of heads, and the parameters. ``constants``: which are needed, and
    the dtypes of the parameters. ``tensors``: the arriving gradients, the inputs, and what was kept.
    """
    part, needs, dtypes = constants
    count = len(part.head_norms)
    x, cos, sin, norm = tensors[3:7]
    arriving, head_norms = list(tensors[:3]), tensors[7 : 7 + count]
    rows, scale, *inner = tensors[7 + count :]
    turned = (part.head_norm_dtype if count else part.dtype,) * 2
    arriving[:2] = turn((-1.0, turned), cos, sin, *arriving[:2])
    of_norms: list[Tensor | None] = []
    for place, spec in enumerate(part.head_norms):
        kept = (*inner[2 * place : 2 * place + 2], head_norms[place])
        of_head, own = norm_gradients((spec, True, needs[2 + place]), arriving[place], *kept)
        assert of_head is not None
        arriving[place] = of_head
        of_norms.append(own)
    asked = (True, *needs[2 + count :])
    of_rows, *of_weights = linear_gradients(weights[0], dtypes, asked, rows, [grad.flatten(1) for grad in arriving])
    assert of_rows is not None
    return *norm_gradients((part.norm, needs[0], needs[1]), of_rows, x, scale, norm), *of_norms, *of_weights


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        part: BeforeAttention,
        weights: Sequence[LinearWeights],
        cos: Tensor,
        sin: Tensor,
        x: Tensor,
        norm: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        head_norms = parameters[: len(part.head_norms)]
        inputs = (x.view(-1, x.shape[-1]), cos, sin, norm, *head_norms)
        query, key, value, *kept = run_segment(compute_heads, part, weights, *inputs)
        ctx.save_for_backward(*inputs, *kept)
        ctx.constants = part, ctx.needs_input_grad[4:], tuple(each.dtype for each in parameters[len(head_norms) :])
        ctx.weights, ctx.shape = weights, x.shape
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        of_x, *others = run_segment(head_gradients, ctx.constants, ctx.weights, *grads, *ctx.saved_tensors)
        return None, None, None, None, None if of_x is None else of_x.view(ctx.shape), *others


def finish_layer(
    part: AfterAttention, weights: Sequence[LinearWeights], x: Tensor, attended: Tensor, norm: Tensor
) -> Sequence[Tensor]:
    """Return the layer's output, and what its gradients need."""
    (projected,) = weights[0].project(attended)
    hidden, rows, scale = add_and_normalize((part.norm, part.dtype), x, projected, norm)
    gate, up = weights[1].project(rows)
    inner, active = activate_and_multiply(part.activation, gate, up)
    (down,) = weights[2].project(inner)
    return hidden + down, hidden, scale, rows, gate, up, active, inner


def layer_gradients(
    constants: tuple[AfterAttention, Sequence[bool], Sequence[Sequence[torch.dtype]]],
    weights: Sequence[LinearWeights],
    grad: Tensor,
    attended: Tensor,
    norm: Tensor,
    hidden: Tensor,
    scale: Tensor,
    rows: Tensor,
    gate: Tensor,
    up: Tensor,
    active: Tensor,
    inner: Tensor,
) -> Sequence[Tensor | None]:
    """Return the gradients of ``finish_layer``: of x, attention, the norm and the parameters. ``constants``: which are needed, and the
    dtypes of the parameters of each product.
    """
    part, needs, dtypes = constants
    asked, place = [], 3
    for each in dtypes:
        asked.append((True, *needs[place : place + len(each)]))
        place += len(each)
    of_inner, *of_down = linear_gradients(weights[2], dtypes[2], asked[2], inner, [grad.to(part.dtype)])
    assert of_inner is not None
    arriving = gated_gradients(part.activation, of_inner, gate, up, active)
    of_rows, *of_gates = linear_gradients(weights[1], dtypes[1], asked[1], rows, arriving)
    assert of_rows is not None
    of_hidden, of_norm = norm_gradients((part.norm, True, needs[2]), of_rows, hidden, scale, norm, grad)
    assert of_hidden is not None
    of_attended, *of_projection = linear_gradients(weights[0], dtypes[0], asked[0], attended, [of_hidden.to(part.dtype)])
    return of_hidden, of_attended, of_norm, *of_projection, *of_gates, *of_down


class _After(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        part: AfterAttention,
        weights: Sequence[LinearWeights],
        counts: Sequence[int],
        x: Tensor,
        attended: Tensor,
        norm: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        rows = attended.flatten(1).to(part.dtype)
        output, *kept = run_segment(finish_layer, part, weights, x.view(-1, x.shape[-1]), rows, norm)
        ctx.save_for_backward(rows, norm, *kept)
        dtypes = iter([each.dtype for each in parameters])
        ctx.constants = part, ctx.needs_input_grad[3:], tuple(tuple(islice(dtypes, count)) for count in counts)
        ctx.weights, ctx.attended = weights, (attended.shape, attended.dtype)
        return torch.ops.aten._unsafe_view(output, x.shape)  # type: ignore[no-any-return]  # of a view FSDP warns

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        arriving = grad.reshape(-1, grad.shape[-1])
        of_x, of_rows, *others = run_segment(layer_gradients, ctx.constants, ctx.weights, arriving, *ctx.saved_tensors)
        shape, dtype = ctx.attended
        return None, None, None, of_x.view(grad.shape), of_rows.view(shape).to(dtype), *others


def before_attention(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    part: BeforeAttention,
    weights: LinearWeights,
    norm: Tensor,
    head_norms: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """[1, T, H], and angles [T, 1, D] -> query [T, heads, D], key and value [T, kv_heads, D].

    ``parameters``: of the three linear layers with these ``weights``; gradients go to them.
    """
    apply: Any = _Before.apply
    rows: tuple[Tensor, Tensor, Tensor] = apply(part, (weights,), cos, sin, x, norm, *head_norms, *parameters)
    return rows


def after_attention(
    x: Tensor,
    attended: Tensor,
    part: AfterAttention,
    weights: Sequence[LinearWeights],
    norm: Tensor,
    parameters: Sequence[Sequence[Tensor]],
) -> Tensor:
    """A layer's input [1, T, H] and its attention [T, heads, D] -> its output [1, T, H].

    ``weights`` and ``parameters``: of the output's projection, of gate and up, of down.
    """
    apply: Any = _After.apply
    counts = tuple(map(len, parameters))
    output: Tensor = apply(part, weights, counts, x, attended, norm, *chain.from_iterable(parameters))
    return output
