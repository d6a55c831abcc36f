"""A linear layer that computes with rounded weights and inputs, and trains the weights that are rounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from strop.models.fake_quant.tensor_quantizer import TensorQuantizer


@dataclass(frozen=True, eq=False)
class LayerQuantizers:
    """The quantisers of a linear layer, or of one projection of all experts of a layer."""

    weight: TensorQuantizer | None
    inputs: TensorQuantizer | None

    def __bool__(self) -> bool:
        return self.weight is not None or self.inputs is not None

    def round_inputs(self, x: Tensor) -> Tensor:
        return x if self.inputs is None else self.inputs.round_inputs(x)


class FakeQuantLinear(nn.Linear):
    """``nn.Linear`` whose products read the rounded weight and the rounded input.

    The class of a layer is changed in place (``fake_quantize_linear``): parameters, names and checkpoints are those of the plain layer. The
    weight is cast to the data type of the products first and rounded then, as an engine does that receives it in that type.
    """

    quantizers: LayerQuantizers
    keeps_rounded: bool  # the weight is rounded already: an engine that received it so

    def forward(self, x: Tensor) -> Tensor:
        dtype = product_dtype(x, self.weight)
        inputs = self.quantizers.round_inputs(x.to(dtype))
        bias = self.bias
        return nn.functional.linear(inputs, self.rounded_weight(dtype), bias if bias is None else bias.to(dtype))

    def rounded_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K] of the products in ``dtype``; its gradient goes to the parameter."""
        weight, quantizer = self.weight.to(dtype), self.quantizers.weight
        return weight if quantizer is None or self.keeps_rounded else quantizer.round(weight)


def fake_quantize_linear(layer: nn.Linear, quantizers: LayerQuantizers, *, keeps_rounded: bool = False) -> None:
    """Change the class of a layer in place. ``keeps_rounded``: its weight arrives rounded, and only inputs are rounded."""
    layer.__class__ = FakeQuantLinear
    layer.__dict__["quantizers"] = quantizers
    layer.__dict__["keeps_rounded"] = keeps_rounded


def round_layer_inputs(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the inputs [..., K] that a layer multiplies: rounded, if it is fake-quantised so."""
    return layer.quantizers.round_inputs(x) if isinstance(layer, FakeQuantLinear) else x


def rounds_layer_inputs(layer: nn.Module) -> bool:
    """Return whether a layer is fake-quantised with rounded inputs."""
    return isinstance(layer, FakeQuantLinear) and layer.quantizers.inputs is not None


def round_base_weight(layer: object, weight: Tensor) -> Tensor:
    """Return the full weight of a layer as its products read it: rounded, if it is fake-quantised so. No gradient."""
    if not isinstance(layer, FakeQuantLinear) or layer.quantizers.weight is None or layer.keeps_rounded:
        return weight
    return layer.quantizers.weight.round_detached(weight)


def product_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the data type of a layer's products: that of autocast, or the weight's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else weight.dtype
