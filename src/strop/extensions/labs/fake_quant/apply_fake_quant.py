"""Fake-quantise a model in place: its linear layers and experts, as rules say (``policy.quant_cfg``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from strop.extensions.labs.fake_quant.fake_quant_linear import (
    FakeQuantLinear,
    LayerQuantizers,
    TensorQuantizer,
    fake_quantize_linear,
    make_input_quantizer,
    make_weight_quantizer,
    product_dtype,
)
from strop.extensions.labs.fake_quant.modelopt_config import QuantizerRules
from strop.models.layers.rounded_layers import RoundedLayer, RoundWeight, layer_name

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


_ADAPTERS = (".lora_A.", ".lora_B.", ".lora_embedding_")


@dataclass(frozen=True)
class FakeQuantSummary:
    """What was quantised in a model."""

    weights: Mapping[str, int]  # number of weights by format; the experts of a layer are one for each projection
    inputs: Mapping[str, int]
    plain: int  # linear layers that compute in high precision

    def __str__(self) -> str:
        def count(formats: Mapping[str, int]) -> str:
            return ", ".join(f"{number} in {name}" for name, number in formats.items()) or "none"

        return f"rounded weights: {count(self.weights)}; rounded inputs: {count(self.inputs)}; {self.plain} linear layers stay as they are"


def apply_fake_quant(
    model: Any, rules: QuantizerRules, *, keeps_rounded: bool = False, sends_rounded: bool = True
) -> FakeQuantSummary:
    """Fake-quantise the linear layers and experts of a causal LM, in place. Adapters are not quantised, what they are added to is.

    ``keeps_rounded``: weights arrive rounded, as an engine receives them, and only inputs are rounded. ``sends_rounded`` false: engines
    round what they receive themselves. Raises ValueError for rules that match nothing, and for experts in a layout that is not known.
    """
    ways = {"keeps_rounded": keeps_rounded, "sends_rounded": sends_rounded}
    weights, inputs, plain = Counter[str](), Counter[str](), 0
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        found: list[LayerQuantizers] = []
        if isinstance(module, nn.Linear) and module is not head and not any(part in f".{name}." for part in _ADAPTERS):
            found = [_quantize_linear(layer_name(name), module, rules, ways)]
            plain += not found[0]
        elif holds_experts(module):
            found = _quantize_experts(layer_name(name), module, rules, ways)
        weights.update(each.weight.format.name for each in found if each.weight is not None)
        inputs.update(each.inputs.format.name for each in found if each.inputs is not None)
    if not weights and not inputs:
        raise ValueError(f"policy.quant_cfg: {rules.source} matches no linear layer of {type(model).__name__}; set it to null")
    return FakeQuantSummary(weights, inputs, plain)


def _quantize_linear(name: str, module: nn.Linear, rules: QuantizerRules, ways: Mapping[str, bool]) -> LayerQuantizers:
    quantizers = LayerQuantizers(make_weight_quantizer(rules.weight_format(name)), make_input_quantizer(rules.input_format(name)))
    if quantizers:
        if type(module) is not nn.Linear:
            raise ValueError(f"policy.quant_cfg: {name} is a {type(module).__name__}, which cannot be fake-quantised; disable it")
        fake_quantize_linear(module, quantizers, **ways)
    return quantizers


def _quantize_experts(name: str, module: Any, rules: QuantizerRules, ways: Mapping[str, bool]) -> list[LayerQuantizers]:
    quantizers: dict[str, LayerQuantizers] = {}
    for projection in PROJECTIONS:
        if projection in module._parameters:
            expert = f"{name}.0.{projection}"
            wanted = LayerQuantizers(
                make_weight_quantizer(rules.weight_format(expert)), make_input_quantizer(rules.input_format(expert))
            )
            if wanted:
                quantizers[projection] = wanted
    if not quantizers:
        return []
    rounds_inputs = any(each.inputs is not None for each in quantizers.values())
    if not hasattr(module, "is_transposed") or (rounds_inputs and not getattr(module, "has_gate", False)):
        raise ValueError(
            f"policy.quant_cfg: the experts {name} ({type(module).__name__}) have a layout that cannot be fake-quantised; disable "
            "'*.experts.*' in the file of quant_cfg"
        )
    fake_quantize_experts(module, quantizers, **ways)
    return list(quantizers.values())


def iter_static_inputs(model: nn.Module) -> Iterator[tuple[str, TensorQuantizer]]:
    """Yield the input quantisers whose scale is calibrated, by name of the layer."""
    for name, quantizer in _input_quantizers(model):
        if quantizer.is_static:
            yield name, quantizer


@contextmanager
def without_rounding(model: nn.Module) -> Iterator[None]:
    """Round nothing inside; static scales that are missing are found from what is read meanwhile."""
    quantizers = list(_iter_quantizers(model))
    for quantizer in quantizers:
        quantizer.paused = True
    try:
        yield
    finally:
        for quantizer in quantizers:
            quantizer.paused = False


def _iter_quantizers(model: nn.Module) -> Iterator[TensorQuantizer]:
    for module in model.modules():
        layers: list[LayerQuantizers] = []
        if isinstance(module, FakeQuantLinear):
            layers = [module.quantizers]
        elif isinstance(module, FakeQuantExperts):
            layers = list(module.quantizers.values())
        yield from (each for layer in layers for each in (layer.weight, layer.inputs) if each is not None)


def _input_quantizers(model: nn.Module) -> Iterator[tuple[str, TensorQuantizer]]:
    for name, module in model.named_modules():
        if isinstance(module, FakeQuantLinear) and module.quantizers.inputs is not None:
            yield layer_name(name), module.quantizers.inputs
        elif isinstance(module, FakeQuantExperts):
            for projection, quantizers in module.quantizers.items():
                if quantizers.inputs is not None:
                    yield f"{name}.{projection}", quantizers.inputs
