"""A linear layer that computes with rounded weights and inputs, and trains the weights that are rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strop.extensions.labs.fake_quant.modelopt_config import QuantizerFormat
from strop.learner.parallel.parallel_dims import to_local
from strop.models.layers.rounded_layers import RoundedLinear, RoundWeight
from strop.models.quantization.number_format import E2M1, NUMBER_FORMATS, NumberFormat, round_trip

# ModelOpt's MXFP4 has scales with which nothing saturates, and NVFP4 may have blocks of 32.
FORMATS: Mapping[str, NumberFormat] = {
    **NUMBER_FORMATS,
    "mxfp4_ceil": NumberFormat("mxfp4_ceil", E2M1, 1, 32, "power_of_two"),
    "nvfp4_32": NumberFormat("nvfp4_32", E2M1, 1, 32, "e4m3"),
}


@dataclass(eq=False)
class TensorQuantizer:
    """Rounds one weight, or the inputs of one layer."""

    format: NumberFormat
    amax: float | None = None  # of static scales: the greatest magnitude, found by calibration; None: that of each tensor
    is_static: bool = False  # needs ``amax``
    paused: bool = False  # rounds nothing; a static scale that is missing is found meanwhile

    def round(self, tensor: Tensor) -> Tensor:
        """[..., R, C] -> the same rounded, in its data type; the gradient passes through. Leading dimensions are separate matrices."""
        if self.paused:
            return tensor
        apply: Any = _StraightThrough.apply
        rounded: Tensor = apply(tensor, self)
        return rounded

    def round_inputs(self, x: Tensor) -> Tensor:
        """[..., C] -> the same rounded: one matrix, whose rows are tokens."""
        if self.is_static and self.paused and x.numel():
            self.amax = max(self.amax or 0.0, float(x.detach().abs().amax()))
        if self.paused:
            return x
        if self.is_static and self.amax is None:
            raise RuntimeError("inputs with a static scale are read before their calibration")
        return self.round(x.reshape(-1, x.shape[-1])).view(x.shape)

    def round_detached(self, tensor: Tensor) -> Tensor:
        """Return what ``round`` returns, without a gradient."""
        amax = None if self.amax is None else torch.tensor(self.amax, device=tensor.device)
        return round_trip(tensor, self.format, amax=amax)


def make_weight_quantizer(wanted: QuantizerFormat | None) -> TensorQuantizer | None:
    return None if wanted is None else TensorQuantizer(FORMATS[wanted.name], _constant_amax(wanted))


def make_input_quantizer(wanted: QuantizerFormat | None) -> TensorQuantizer | None:
    return (
        None if wanted is None else TensorQuantizer(FORMATS[wanted.name], _constant_amax(wanted), is_static=wanted.static_inputs)
    )


def _constant_amax(wanted: QuantizerFormat) -> float | None:
    return FORMATS[wanted.name].element.largest if wanted.constant_amax else None


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, quantizer: TensorQuantizer) -> Tensor:
        return quantizer.round_detached(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grads[0], None


# Rounding on tensor-parallel ranks: a shard is rounded exactly as its part of the whole tensor is.
#
# Blocks that lie within a shard need only the largest magnitude of the whole tensor, if the format has a per-tensor scale. A shard
# that cuts blocks is gathered first.

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


@dataclass(frozen=True, eq=False)
class LayerQuantizers:
    """The quantisers of a linear layer, or of one projection of all experts of a layer."""

    weight: TensorQuantizer | None
    inputs: TensorQuantizer | None

    def __bool__(self) -> bool:
        return self.weight is not None or self.inputs is not None

    def round_inputs(self, x: Tensor) -> Tensor:
        return x if self.inputs is None else self.inputs.round_inputs(x)


class FakeQuantLinear(RoundedLinear):
    """``nn.Linear`` whose products read the rounded weight and the rounded input.

    The class of a layer is changed in place (``fake_quantize_linear``): parameters, names and checkpoints are those of the plain layer. The
    weight is cast to the data type of the products first and rounded then, as an engine does that receives it in that type.
    """

    rounded_by = "policy.quant_cfg"
    quantizers: LayerQuantizers
    keeps_rounded: bool  # the weight is rounded already: an engine that received it so
    sends_rounded: bool  # engines are sent the rounded weight; False: they round it themselves, to the same format

    def forward(self, x: Tensor) -> Tensor:
        dtype = product_dtype(x, self.weight)
        inputs = self.round_inputs(x.to(dtype))
        bias = self.bias
        return nn.functional.linear(inputs, self.rounded_weight(dtype), bias if bias is None else bias.to(dtype))

    @property
    def rounds_inputs(self) -> bool:
        return self.quantizers.inputs is not None

    def round_inputs(self, x: Tensor) -> Tensor:
        return self.quantizers.round_inputs(x)

    def rounded_weight(self, dtype: torch.dtype) -> Tensor:
        weight, quantizer = self.weight.to(dtype), self.quantizers.weight
        return weight if quantizer is None or self.keeps_rounded else quantizer.round(weight)

    def round_full_weight(self, weight: Tensor) -> Tensor:
        quantizer = self.quantizers.weight
        return weight if quantizer is None or self.keeps_rounded else quantizer.round_detached(weight)

    def sent_roundings(self) -> Mapping[str, RoundWeight]:
        quantizer = self.quantizers.weight
        if quantizer is None or self.keeps_rounded or not self.sends_rounded:
            return {}
        return {"weight": quantizer.round_detached}

    def shard(self, group: Any, dimension: int) -> None:
        self.__class__ = ShardedFakeQuantLinear
        self.__dict__["own_shard"] = RoundedShard(group, dimension)


class ShardedFakeQuantLinear(FakeQuantLinear):
    """A fake-quantised layer that uses this rank's shard of its weight."""

    own_shard: RoundedShard

    def forward(self, x: Tensor) -> Tensor:
        dtype, quantizers = product_dtype(x, self.weight), self.quantizers
        x, by_outputs = x.to(dtype), self.own_shard.dimension == 0
        if quantizers.inputs is not None:
            x = quantizers.round_inputs(x) if by_outputs else self._round_cut_inputs(x, quantizers.inputs)
        # The bias of a layer that is sharded by inputs is added after the sum over the ranks, by a hook.
        bias = to_local(self.bias).to(dtype) if by_outputs and self.bias is not None else None
        return nn.functional.linear(x, self.rounded_weight(dtype), bias)

    def rounded_weight(self, dtype: torch.dtype) -> Tensor:
        weight, quantizer = to_local(self.weight).to(dtype), self.quantizers.weight
        return weight if quantizer is None or self.keeps_rounded else self.own_shard.round(weight, quantizer)

    def _round_cut_inputs(self, x: Tensor, quantizer: TensorQuantizer) -> Tensor:
        return self.own_shard.round(x.reshape(-1, x.shape[-1]), quantizer).view(x.shape)


def fake_quantize_linear(
    layer: nn.Linear, quantizers: LayerQuantizers, *, keeps_rounded: bool = False, sends_rounded: bool = True
) -> None:
    """Change the class of a layer in place. ``keeps_rounded``: its weight arrives rounded, and only inputs are rounded."""
    layer.__class__ = FakeQuantLinear
    layer.__dict__["quantizers"] = quantizers
    layer.__dict__["keeps_rounded"] = keeps_rounded
    layer.__dict__["sends_rounded"] = sends_rounded


def product_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the data type of a layer's products: that of autocast, or the weight's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else weight.dtype
