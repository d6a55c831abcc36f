"""A linear layer that computes with rounded weights and inputs, and trains the weights that are rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strop.extensions.labs.fake_quant.rounded_shard import RoundedShard
from strop.extensions.labs.fake_quant.tensor_quantizer import TensorQuantizer
from strop.learner.parallel.parallel_dims import to_local
from strop.models.layers.rounded_layers import RoundedLinear, RoundWeight


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
