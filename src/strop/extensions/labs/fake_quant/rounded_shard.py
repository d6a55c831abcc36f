"""Rounding on tensor-parallel ranks: a shard is rounded exactly as its part of the whole tensor is.

Blocks that lie within a shard need only the largest magnitude of the whole tensor, if the format has a per-tensor scale. A shard
that cuts blocks is gathered first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.extensions.labs.fake_quant.tensor_quantizer import TensorQuantizer
from strop.models.quantization.number_format import NumberFormat, round_trip

dist: Any = torch.distributed
Group = Any  # torch.distributed.ProcessGroup


@dataclass(frozen=True)
class RoundedShard:
    """How the weight of a layer is sharded over tensor-parallel ranks."""

    group: Group
    dimension: int  # 0: outputs ("columns" in plans); 1: inputs

    def round(self, tensor: Tensor, quantizer: TensorQuantizer) -> Tensor:
        """Round a shard along ``dimension`` of a matrix [R, C]; the gradient passes through."""
        apply: Any = _ShardStraightThrough.apply
        rounded: Tensor = apply(tensor, quantizer, self)
        return rounded


class _ShardStraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, quantizer: TensorQuantizer, shard: RoundedShard) -> Tensor:
        if not _has_whole_blocks(tensor, quantizer.format, shard.dimension):
            return _round_gathered(tensor, quantizer, shard)
        if quantizer.amax is not None:
            return quantizer.round_detached(tensor)
        return round_trip(tensor, quantizer.format, amax=_find_amax(tensor, quantizer.format, shard.group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grads[0], None, None


def _has_whole_blocks(tensor: Tensor, number_format: NumberFormat, dimension: int) -> bool:
    """Return whether the format's blocks are not cut, or the only block is the whole matrix."""
    if number_format.one_scale:
        return True
    block = number_format.rows if dimension == 0 else number_format.columns
    return block is not None and tensor.shape[dimension] % block == 0


def _find_amax(tensor: Tensor, number_format: NumberFormat, group: Group) -> Tensor | None:
    """Return the largest magnitude of the whole matrix, if the format has a per-tensor scale."""
    if not number_format.one_scale and number_format.scale != "e4m3":
        return None
    amax = tensor.detach().abs().amax().float()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


def _round_gathered(tensor: Tensor, quantizer: TensorQuantizer, shard: RoundedShard) -> Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(shard.group))]
    dist.all_gather(parts, tensor.contiguous(), group=shard.group)
    whole = quantizer.round_detached(torch.cat(parts, shard.dimension))
    own: Tensor = whole.chunk(len(parts), shard.dimension)[dist.get_rank(shard.group)].contiguous()
    return own
