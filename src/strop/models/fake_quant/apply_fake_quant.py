"""Fake-quantise a model in place: its linear layers and experts, as rules say (``policy.quant_cfg``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.fake_quant.fake_quant_experts import (
    PROJECTIONS,
    FakeQuantExperts,
    fake_quantize_experts,
    holds_experts,
    round_experts,
)
from strop.models.fake_quant.fake_quant_linear import FakeQuantLinear, LayerQuantizers, fake_quantize_linear
from strop.models.fake_quant.quantizer_rules import QuantizerRules
from strop.models.fake_quant.tensor_quantizer import TensorQuantizer, make_input_quantizer, make_weight_quantizer

_ADAPTERS = (".lora_A.", ".lora_B.", ".lora_embedding_")
RoundWeight = Callable[[Tensor], Tensor]


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


def apply_fake_quant(model: Any, rules: QuantizerRules, *, keeps_rounded: bool = False) -> FakeQuantSummary:
    """Fake-quantise the linear layers and experts of a causal LM, in place. Adapters are not quantised, what they are added to is.

    ``keeps_rounded``: weights arrive rounded, as an engine receives them, and only inputs are rounded. Raises ValueError for rules that
    match nothing, and for experts in a layout that is not known.
    """
    weights, inputs, plain = Counter[str](), Counter[str](), 0
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        found: list[LayerQuantizers] = []
        if isinstance(module, nn.Linear) and module is not head and not any(part in f".{name}." for part in _ADAPTERS):
            found = [_quantize_linear(layer_name(name), module, rules, keeps_rounded)]
            plain += not found[0]
        elif holds_experts(module):
            found = _quantize_experts(layer_name(name), module, rules, keeps_rounded)
        weights.update(each.weight.format.name for each in found if each.weight is not None)
        inputs.update(each.inputs.format.name for each in found if each.inputs is not None)
    if not weights and not inputs:
        raise ValueError(f"policy.quant_cfg: {rules.source} matches no linear layer of {type(model).__name__}; set it to null")
    return FakeQuantSummary(weights, inputs, plain)


def _quantize_linear(name: str, module: nn.Linear, rules: QuantizerRules, keeps_rounded: bool) -> LayerQuantizers:
    quantizers = LayerQuantizers(make_weight_quantizer(rules.weight_format(name)), make_input_quantizer(rules.input_format(name)))
    if quantizers:
        if type(module) is not nn.Linear:
            raise ValueError(f"policy.quant_cfg: {name} is a {type(module).__name__}, which cannot be fake-quantised; disable it")
        fake_quantize_linear(module, quantizers, keeps_rounded=keeps_rounded)
    return quantizers


def _quantize_experts(name: str, module: Any, rules: QuantizerRules, keeps_rounded: bool) -> list[LayerQuantizers]:
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
    fake_quantize_experts(module, quantizers, keeps_rounded=keeps_rounded)
    return list(quantizers.values())


def layer_name(name: str) -> str:
    """Return the name of a layer in the model without adapters."""
    return name.removesuffix(".base_layer")


def is_fake_quantized(model: nn.Module) -> bool:
    return any(isinstance(module, FakeQuantLinear | FakeQuantExperts) for module in model.modules())


def rounds_inputs(model: nn.Module) -> bool:
    """Return whether any layer rounds its inputs."""
    return any(True for _ in _input_quantizers(model))


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


def weight_roundings(model: nn.Module) -> dict[str, RoundWeight]:
    """Return what rounds the weights that engines receive, by canonical name: the full tensor, in the data type that it is sent in."""
    roundings: dict[str, RoundWeight] = {}
    for name, module in model.named_modules():
        if isinstance(module, FakeQuantLinear) and module.quantizers.weight is not None and not module.keeps_rounded:
            roundings[f"{layer_name(name)}.weight"] = module.quantizers.weight.round_detached
        elif isinstance(module, FakeQuantExperts) and not module.keeps_rounded:
            for projection, quantizers in module.quantizers.items():
                if quantizers.weight is not None:
                    roundings[f"{name}.{projection}"] = _rounding_of(quantizers, bool(module.is_transposed))
    return roundings


def _rounding_of(quantizers: LayerQuantizers, transposed: bool) -> RoundWeight:
    return torch.no_grad()(lambda weight: round_experts(weight, quantizers, transposed=transposed))
