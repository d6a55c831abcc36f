"""A decoder layer with Llama's code as two nodes of the gradient's graph, one before attention and one after it, in place of a dozen.

A node runs the autograd functions of fused layers one after the other: values, roundings, gradients and what is saved are theirs. It saves
the host the calls of modules, views and nodes, which is what a layer takes where a GPU is faster than the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from strop.models.layers.fused_functions import (
    JoinedLinear,
    activate_and_multiply,
    add_and_normalize,
    gated_gradients,
    norm_gradients,
    norm_gradients_and_sum,
    normalize,
    turn,
)
from strop.models.layers.known_code import RmsNormSpec
from strop.models.layers.segments import run_segment
from strop.models.layers.weight_copies import LinearWeights


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
