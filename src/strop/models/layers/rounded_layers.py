"""Layers that compute with rounded weights or inputs, and what the rest asks of them: engines, adapters, tensor-parallel plans.

A model gets such layers as it is loaded; their parameters, names and checkpoints are those of the plain layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

RoundWeight = Callable[[Tensor], Tensor]


class RoundedLayer(nn.Module):
    """A layer, or all experts of one, whose products read rounded weights or inputs."""

    rounded_by: str  # the key that a message names: policy.quant_cfg

    @property
    def rounds_inputs(self) -> bool:
        raise NotImplementedError

    def sent_roundings(self) -> Mapping[str, RoundWeight]:
        """Return what rounds the full parameters, by their names, that engines are sent: in the data type that they are sent in."""
        raise NotImplementedError


class RoundedLinear(RoundedLayer, nn.Linear):
    """A linear layer with rounded products: ``nn.Linear``'s forward pass over ``round_inputs(x)`` and ``rounded_weight(dtype)``."""

    def round_inputs(self, x: Tensor) -> Tensor:
        """Return the inputs [..., K] that the layer multiplies."""
        raise NotImplementedError

    def rounded_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K] that the layer multiplies, in ``dtype``; its gradient goes to the parameter."""
        raise NotImplementedError

    def round_full_weight(self, weight: Tensor) -> Tensor:
        """Return the layer's full weight as its products read it. No gradient."""
        raise NotImplementedError

    def shard(self, group: Any, dimension: int) -> None:
        """Compute from now on with a shard of the weight, which is about to be made along a dimension (0: outputs, 1: inputs)."""
        raise NotImplementedError


def round_base_weight(layer: object, weight: Tensor) -> Tensor:
    """Return the full weight of a layer as its products read it. No gradient."""
    return layer.round_full_weight(weight) if isinstance(layer, RoundedLinear) else weight


def find_rounded(model: nn.Module, *, inputs: bool = False) -> RoundedLayer | None:
    """Return a layer that rounds, or one that rounds its ``inputs``; None if the model has none."""
    layers = (module for module in model.modules() if isinstance(module, RoundedLayer))
    return next((layer for layer in layers if layer.rounds_inputs or not inputs), None)


def weight_roundings(model: nn.Module) -> dict[str, RoundWeight]:
    """Return what rounds the weights that engines receive, by canonical name: the full tensor, in the data type that it is sent in."""
    return {
        f"{layer_name(name)}.{parameter}": rounding
        for name, module in model.named_modules()
        if isinstance(module, RoundedLayer)
        for parameter, rounding in module.sent_roundings().items()
    }


def layer_name(name: str) -> str:
    """Return the name of a layer in the model without adapters."""
    return name.removesuffix(".base_layer")
