"""Fake-quantised linear layers on tensor-parallel ranks: a shard is rounded exactly like its part of the whole tensor.

Blocks that lie within a shard need only the largest magnitude of the whole tensor, if the format has a per-tensor scale. A shard
that cuts blocks is gathered first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from strop.learner.parallel.parallel_dims import to_local
from strop.models.fake_quant.fake_quant_linear import FakeQuantLinear, product_dtype
from strop.models.fake_quant.tensor_quantizer import TensorQuantizer
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


class ShardedFakeQuantLinear(FakeQuantLinear):
    """A fake-quantised layer that uses this rank's shard of its weight."""

    shard: RoundedShard

    def forward(self, x: Tensor) -> Tensor:
        dtype, quantizers = product_dtype(x, self.weight), self.quantizers
        x, by_outputs = x.to(dtype), self.shard.dimension == 0
        if quantizers.inputs is not None:
            x = quantizers.round_inputs(x) if by_outputs else self._round_cut_inputs(x, quantizers.inputs)
        # The bias of a layer that is sharded by inputs is added after the sum over the ranks, by a hook.
        bias = to_local(self.bias).to(dtype) if by_outputs and self.bias is not None else None
        return F.linear(x, self.rounded_weight(dtype), bias)

    def rounded_weight(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's shard of the rounded weight."""
        weight, quantizer = to_local(self.weight).to(dtype), self.quantizers.weight
        return weight if quantizer is None or self.keeps_rounded else self.shard.round(weight, quantizer)

    def _round_cut_inputs(self, x: Tensor, quantizer: TensorQuantizer) -> Tensor:
        return self.shard.round(x.reshape(-1, x.shape[-1]), quantizer).view(x.shape)


def shard_fake_quant_linear(layer: FakeQuantLinear, group: Group, dimension: int) -> None:
    """Change the class of a layer whose weight is about to be sharded, in place."""
    layer.__class__ = ShardedFakeQuantLinear
    layer.__dict__["shard"] = RoundedShard(group, dimension)


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
