"""A linear recurrence over padded sequences, computed in blocks of tokens from a state to the next.

Between blocks only the state is kept: the backward pass computes each block again, so memory grows with the states, not with the
products inside of blocks. A row of zeros leaves a state unchanged, which is what pads sequences of several lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Rows = Sequence[Tensor]
Block = Callable[[Rows, Tensor, Rows], tuple[Tensor, Tensor]]
Kernel = Callable[[Rows, "Tensor | None"], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class MixerSpec:
    """The place of a convolution or recurrence in a model, under which an engine keeps its state."""

    layer: int
    call: int  # which one of the layer: Zamba has a scan for each head


@dataclass(frozen=True, eq=False)
class Recurrence:
    """Tokens of a sequence change a state, and read it."""

    block: Block
    """(rows [S, L, ...], state [S, ...], constants) -> outputs [S, L, ...] and the state after them, differentiable"""
    state_shape: tuple[int, ...]
    length: int  # of a block, in tokens
    constants: tuple[Tensor, ...] = ()  # the same for all tokens
    kernel: Kernel | None = None  # of a package, in place of blocks

    def __call__(self, rows: Rows, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rows [S, L, ...] and the states [S, ...] before them (None: zeros) -> outputs [S, L, ...] and the last states."""
        if self.kernel is not None and rows[0].shape[1] > 1:  # kernels have chunks, of which one token would leave most empty
            return self.kernel(rows, state)
        if state is None:
            state = rows[0].new_zeros(len(rows[0]), *self.state_shape)
        apply: Any = _Blocks.apply
        outputs, last = apply(self, len(rows), state, *rows, *self.constants)
        return outputs, last

    def run_block(self, rows: Rows, state: Tensor, constants: Rows) -> tuple[Tensor, Tensor]:
        with torch.autocast(state.device.type, enabled=False):
            return self.block(rows, state, constants)


class MixerPlan(Protocol):
    """Decides which tokens precede which, for layers that carry a state from token to token."""

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, spec: MixerSpec) -> Tensor:
        """Causal depthwise convolution of one flat row: inputs [T, C], weight [C, k] -> [T, C]."""
        ...

    def scan(self, recurrence: Recurrence, rows: Rows, spec: MixerSpec) -> Tensor:
        """Outputs [T, ...] of a recurrence over the tokens of one flat row, rows [T, ...]."""
        ...


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recurrence: Recurrence, count: int, state: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        rows, constants = tensors[:count], tensors[count:]
        states, outputs = [], []
        for start in range(0, rows[0].shape[1], recurrence.length):
            states.append(state)
            output, state = recurrence.run_block(_cut(rows, start, recurrence.length), state, constants)
            outputs.append(output)
        ctx.save_for_backward(*tensors, *states)
        ctx.recurrence, ctx.count, ctx.tensors = recurrence, count, len(tensors)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), state

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        recurrence: Recurrence = ctx.recurrence
        saved = ctx.saved_tensors
        rows, constants, states = saved[: ctx.count], saved[ctx.count : ctx.tensors], saved[ctx.tensors :]
        grads: list[tuple[Tensor, ...]] = []
        totals = [torch.zeros_like(each) for each in constants]
        for place in reversed(range(len(states))):
            start = place * recurrence.length
            leaves = [
                each.detach().requires_grad_() for each in (states[place], *_cut(rows, start, recurrence.length), *constants)
            ]
            with torch.enable_grad():
                computed = recurrence.run_block(leaves[1 : 1 + ctx.count], leaves[0], leaves[1 + ctx.count :])
            arriving = (grad[:, start : start + recurrence.length], grad_state)
            grad_state, *found = torch.autograd.grad(computed, leaves, arriving)
            grads.append(tuple(found[: ctx.count]))
            for total, each in zip(totals, found[ctx.count :], strict=True):
                total += each
        joined = (torch.cat(parts[::-1], 1) for parts in zip(*grads, strict=True))
        return None, None, grad_state, *joined, *totals


def _cut(rows: Rows, start: int, length: int) -> list[Tensor]:
    return [each[:, start : start + length] for each in rows]
