"""The experts of a layer, in tensors [E, ...], that compute with rounded weights and inputs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from strop.extensions.labs.fake_quant.fake_quant_linear import LayerQuantizers, product_dtype
from strop.models.layers.rounded_layers import RoundedLayer, RoundWeight

PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")


class FakeQuantExperts(RoundedLayer):
    """Mixin for the class of a layer's experts: their forward pass reads rounded weights, one matrix and scale for each expert.

    The gate and the projection up are one matrix, as engines and Megatron Core fuse them. Parameters, names and checkpoints are those of
    the plain experts.
    """

    rounded_by = "policy.quant_cfg"
    plain_class: type[nn.Module]
    quantizers: Mapping[str, LayerQuantizers]  # by projection
    keeps_rounded: bool
    sends_rounded: bool

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[n, H], the experts of each token [n, k] and their weights [n, k] -> [n, H]."""
        rounded = RoundedExperts(self, product_dtype(hidden_states, self.down_proj))  # type: ignore[arg-type]
        return rounded.compute(hidden_states, top_k_index, top_k_weights)

    @property
    def rounds_inputs(self) -> bool:
        return any(each.inputs is not None for each in self.quantizers.values())

    def sent_roundings(self) -> Mapping[str, RoundWeight]:
        if self.keeps_rounded or not self.sends_rounded:
            return {}
        transposed = bool(self.is_transposed)
        return {
            projection: torch.no_grad()(partial(round_experts, quantizers=quantizers, transposed=transposed))
            for projection, quantizers in self.quantizers.items()
            if quantizers.weight is not None
        }


class RoundedExperts:
    """A layer's experts with rounded weights, for the forward method of their plain class."""

    def __init__(self, experts: Any, dtype: torch.dtype) -> None:
        """``experts``: the module, or what stands for the experts of one rank."""
        self._experts = experts
        self._dtype = dtype
        for name, quantizers in experts.quantizers.items():
            weight = round_experts(getattr(experts, name).to(dtype), quantizers, transposed=experts.is_transposed)
            self.__dict__[name] = getattr(experts, name) if experts.keeps_rounded else weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)

    def compute(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if not any(each.inputs is not None for each in self.quantizers.values()):
            output: Tensor = self.plain_class.forward(self, hidden, index, weights)
            return output
        from transformers.integrations.moe import (
            grouped_mm_experts_forward,  # hands the input of the projection down to _apply_gate
        )

        first = self.quantizers.get("gate_up_proj")
        inputs = hidden.to(self._dtype) if first is None else first.round_inputs(hidden.to(self._dtype))
        output = grouped_mm_experts_forward(self, inputs, index, weights)  # type: ignore[arg-type]
        return output.to(hidden.dtype)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        """[n, 2I] -> the input of the projection down [n, I], rounded."""
        gated: Tensor = self._experts._apply_gate(gate_up)
        down = self.quantizers.get("down_proj")
        return gated if down is None else down.round_inputs(gated.to(self._dtype))


def round_experts(weight: Tensor, quantizers: LayerQuantizers, *, transposed: bool) -> Tensor:
    """[E, N, K], or with ``transposed`` [E, K, N] -> the same rounded, in blocks along K."""
    if quantizers.weight is None:
        return weight
    return quantizers.weight.round(weight.mT.contiguous()).mT if transposed else quantizers.weight.round(weight)


def fake_quantize_experts(
    module: Any, quantizers: Mapping[str, LayerQuantizers], *, keeps_rounded: bool = False, sends_rounded: bool = True
) -> None:
    """Change the class of a layer's experts in place. ``keeps_rounded``: their weights arrive rounded, and only inputs are rounded."""
    kind = type(module)
    module.__class__ = type(f"FakeQuant{kind.__name__}", (FakeQuantExperts, kind), {"plain_class": kind})
    module.__dict__["quantizers"] = quantizers
    module.__dict__["keeps_rounded"] = keeps_rounded
    module.__dict__["sends_rounded"] = sends_rounded


def holds_experts(module: nn.Module) -> bool:
    """Return whether a module has all experts of a layer in tensors [E, ...]."""
    weight = module._parameters.get("down_proj")
    return weight is not None and weight.dim() == 3
