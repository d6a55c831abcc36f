"""Differentiable collectives, in pairs: each is the backward pass of the other.

    copy_to_ranks  equal input, different use on each rank   |  all_reduce      partial sums -> the sum on every rank
    all_gather     rows of each rank, different use of all   |  reduce_scatter  partial sums -> this rank's rows of the sum
    split_rows     equal input -> this rank's rows           |  join_rows       rows of each rank, equal use of all

After ``copy_to_ranks`` and ``all_gather`` the ranks compute different things: their gradients are summed. ``split_rows`` and ``join_rows``
are for ranks that compute the same thing: their gradients are equal. Confusing the two silently multiplies a gradient by the number of
ranks; the parity tests detect it. (Megatron-LM, arXiv 1909.08053 and 2205.05198.)

Rows are the first dimension, and each rank has the same number of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

dist: Any = torch.distributed  # untyped
Group = Any  # torch.distributed.ProcessGroup


def copy_to_ranks(tensor: Tensor, group: Group) -> Tensor:
    """Return the tensor, equal on all ranks; backward: the sum of the ranks' gradients."""
    return _apply(_Copy, tensor, group)


def all_reduce(tensor: Tensor, group: Group) -> Tensor:
    """Return the sum over the ranks; backward: the same gradient on each rank."""
    return _apply(_AllReduce, tensor, group)


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    """[n, ...] of each rank -> [ranks * n, ...]; backward: the sum of the ranks' gradients of this rank's rows."""
    return _apply(_AllGather, tensor, group)


def reduce_scatter(tensor: Tensor, group: Group) -> Tensor:
    """[ranks * n, ...] -> [n, ...]: this rank's rows of the sum over the ranks; backward: the ranks' gradients, gathered."""
    return _apply(_ReduceScatter, tensor, group)


def split_rows(tensor: Tensor, group: Group) -> Tensor:
    """[ranks * n, ...], equal on all ranks -> this rank's rows [n, ...]; backward: the ranks' gradients, gathered."""
    return _apply(_Split, tensor, group)


def join_rows(tensor: Tensor, group: Group) -> Tensor:
    """[n, ...] of each rank -> [ranks * n, ...], used equally by all ranks; backward: the gradient of this rank's rows."""
    return _apply(_Join, tensor, group)


def all_to_all(
    tensor: Tensor, group: Group, receive_sizes: list[int] | None = None, send_sizes: list[int] | None = None
) -> Tensor:
    """Send ``send_sizes[r]`` rows to rank r and receive ``receive_sizes[r]`` rows from it; equal sizes if None.

    Backward: the reverse all-to-all.
    """
    apply: Any = _AllToAll.apply
    exchanged: Tensor = apply(tensor, group, receive_sizes, send_sizes)
    return exchanged


def _apply(function: type[torch.autograd.Function], tensor: Tensor, group: Group) -> Tensor:
    if dist.get_world_size(group) == 1:
        return tensor
    apply: Any = function.apply
    result: Tensor = apply(tensor, group)
    return result


class _Collective(torch.autograd.Function):
    """A collective whose backward pass is another function of (tensor, group), ``ctx.reverse``."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        reverse: Any = ctx.reverse
        return reverse(grad, ctx.group), None


class _Copy(_Collective):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.reverse = group, _all_reduce
        return tensor.view_as(tensor)


class _AllReduce(_Collective):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.reverse = group, _identity
        return _all_reduce(tensor, group)


class _AllGather(_Collective):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.reverse = group, _reduce_scatter
        return _all_gather(tensor, group)


class _ReduceScatter(_Collective):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.reverse = group, _all_gather
        return _reduce_scatter(tensor, group)


class _Split(_Collective):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.reverse = group, _all_gather
        return local_rows(tensor, group).clone()


class _Join(_Collective):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.reverse = group, _copy_local_rows
        return _all_gather(tensor, group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, received: list[int] | None, sent: list[int] | None) -> Tensor:
        ctx.group, ctx.received, ctx.sent = group, received, sent
        return _all_to_all(tensor, group, received, sent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _all_to_all(grad, ctx.group, ctx.sent, ctx.received), None, None, None


def local_rows(tensor: Tensor, group: Group) -> Tensor:
    """Return a view of this rank's rows of [ranks * n, ...]."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if len(tensor) % size:
        raise ValueError(f"{len(tensor)} rows cannot be split evenly among {size} ranks; pad them first")
    count = len(tensor) // size
    return tensor[rank * count : (rank + 1) * count]


def _copy_local_rows(tensor: Tensor, group: Group) -> Tensor:
    return local_rows(tensor, group).contiguous()


def _identity(tensor: Tensor, group: Group) -> Tensor:
    return tensor


def _all_reduce(tensor: Tensor, group: Group) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather(tensor: Tensor, group: Group) -> Tensor:
    gathered = tensor.new_empty(len(tensor) * dist.get_world_size(group), *tensor.shape[1:])
    dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=group)
    return gathered


def _reduce_scatter(tensor: Tensor, group: Group) -> Tensor:
    rows = torch.empty_like(local_rows(tensor, group), memory_format=torch.contiguous_format)
    dist.reduce_scatter_tensor(rows, tensor.contiguous(), group=group)
    return rows


def _all_to_all(tensor: Tensor, group: Group, received: list[int] | None, sent: list[int] | None) -> Tensor:
    size = len(tensor) if received is None else sum(received)
    result = tensor.new_empty(size, *tensor.shape[1:])
    dist.all_to_all_single(result, tensor.contiguous(), received, sent, group=group)
    return result
