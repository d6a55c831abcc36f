"""Collectives that gradients pass through, in pairs: the backward pass of each is the other one of its pair.

    copy          every rank has it; each uses it for something else   |  reduce_sum    each has a part of the sum
    gather        each has rows; every rank uses all of them           |  scatter_sum   each has a part of the sum, and wants rows
    split         every rank has it and does the same with it; rows    |  join          each has rows; every rank does the same with all

``copy`` and ``gather`` are for ranks that go on differently: their gradients add up. ``split`` and ``join`` are for ranks that go on alike:
their gradients are equal. Taking the one for the other multiplies a gradient by the number of ranks, and nothing says so: the parity
tests do. (Megatron-LM, arXiv 1909.08053 and 2205.05198.)

Rows are the first dimension, and each rank has the same number of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

dist: Any = torch.distributed  # what is used of it has no types
Group = Any  # torch.distributed.ProcessGroup


def copy(tensor: Tensor, group: Group) -> Tensor:
    """The same on every rank; backward: the sum of the ranks' gradients."""
    return _apply(_Copy, tensor, group)


def reduce_sum(tensor: Tensor, group: Group) -> Tensor:
    """The sum over the ranks; backward: the same gradient for each."""
    return _apply(_Reduce, tensor, group)


def gather(tensor: Tensor, group: Group) -> Tensor:
    """[n, ...] of each rank -> [ranks * n, ...]; backward: each gets the sum of the gradients of its rows."""
    return _apply(_Gather, tensor, group)


def scatter_sum(tensor: Tensor, group: Group) -> Tensor:
    """[ranks * n, ...] -> [n, ...]: this rank's rows of the sum over the ranks; backward: the gradients of all rows."""
    return _apply(_Scatter, tensor, group)


def split(tensor: Tensor, group: Group) -> Tensor:
    """[ranks * n, ...], equal on all ranks -> this rank's rows [n, ...]; backward: the gradients of all rows."""
    return _apply(_Split, tensor, group)


def join(tensor: Tensor, group: Group) -> Tensor:
    """[n, ...] of each rank -> [ranks * n, ...], with which all do the same; backward: the gradient of this rank's rows."""
    return _apply(_Join, tensor, group)


def exchange(tensor: Tensor, group: Group, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
    """All to all along the first dimension: ``sent[r]`` rows go to rank r, ``received[r]`` come from it; equal pieces where both are None.

    Backward: the same the other way round."""
    apply: Any = _Exchange.apply
    exchanged: Tensor = apply(tensor, group, received, sent)
    return exchanged


def _apply(function: type[torch.autograd.Function], tensor: Tensor, group: Group) -> Tensor:
    if dist.get_world_size(group) == 1:
        return tensor
    apply: Any = function.apply
    result: Tensor = apply(tensor, group)
    return result


class _Collective(torch.autograd.Function):
    """Two functions of (tensor, group): one forward, the other backward."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        there: Any = ctx.back
        return there(grad, ctx.group), None


class _Copy(_Collective):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.back = group, _summed
        return tensor.view_as(tensor)


class _Reduce(_Collective):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.back = group, _unchanged
        return _summed(tensor, group)


class _Gather(_Collective):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.back = group, _scattered
        return _gathered(tensor, group)


class _Scatter(_Collective):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.back = group, _gathered
        return _scattered(tensor, group)


class _Split(_Collective):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.back = group, _gathered
        return own_rows(tensor, group).clone()


class _Join(_Collective):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.back = group, _own_copy
        return _gathered(tensor, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, received: list[int] | None, sent: list[int] | None) -> Tensor:
        ctx.group, ctx.received, ctx.sent = group, received, sent
        return _exchanged(tensor, group, received, sent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _exchanged(grad, ctx.group, ctx.sent, ctx.received), None, None, None


def own_rows(tensor: Tensor, group: Group) -> Tensor:
    """This rank's rows of [ranks * n, ...], a view."""
    size, place = dist.get_world_size(group), dist.get_rank(group)
    if len(tensor) % size:
        raise ValueError(f"{len(tensor)} rows cannot be divided evenly among {size} ranks; pad them first")
    count = len(tensor) // size
    return tensor[place * count : (place + 1) * count]


def _own_copy(tensor: Tensor, group: Group) -> Tensor:
    return own_rows(tensor, group).contiguous()


def _unchanged(tensor: Tensor, group: Group) -> Tensor:
    return tensor


def _summed(tensor: Tensor, group: Group) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gathered(tensor: Tensor, group: Group) -> Tensor:
    whole = tensor.new_empty(len(tensor) * dist.get_world_size(group), *tensor.shape[1:])
    dist.all_gather_into_tensor(whole, tensor.contiguous(), group=group)
    return whole


def _scattered(tensor: Tensor, group: Group) -> Tensor:
    own = torch.empty_like(own_rows(tensor, group), memory_format=torch.contiguous_format)
    dist.reduce_scatter_tensor(own, tensor.contiguous(), group=group)
    return own


def _exchanged(tensor: Tensor, group: Group, received: list[int] | None, sent: list[int] | None) -> Tensor:
    size = len(tensor) if received is None else sum(received)
    result = tensor.new_empty(size, *tensor.shape[1:])
    dist.all_to_all_single(result, tensor.contiguous(), received, sent, group=group)
    return result
