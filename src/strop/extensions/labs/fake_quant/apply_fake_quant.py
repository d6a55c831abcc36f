"""Fake-quantise a model in place: its linear layers and experts, as rules say (``policy.quant_cfg``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from strop.extensions.labs.fake_quant.fake_quant_experts import (
    PROJECTIONS,
    FakeQuantExperts,
    fake_quantize_experts,
    holds_experts,
)
from strop.extensions.labs.fake_quant.fake_quant_linear import FakeQuantLinear, LayerQuantizers, fake_quantize_linear
from strop.extensions.labs.fake_quant.quantizer_rules import QuantizerRules
from strop.extensions.labs.fake_quant.tensor_quantizer import TensorQuantizer, make_input_quantizer, make_weight_quantizer
from strop.models.layers.rounded_layers import layer_name

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
