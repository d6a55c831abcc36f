"""A layer of an extension that rounds: engines, adapters and publishes compute with what it computes with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strop.generation.torch import fast_layers
from strop.generation.torch.fast_linears import FastLinears
from strop.learner.torch import layer_compilation
from strop.models.adapters import lora_layers, merged_roundings
from strop.models.layers.rounded_layers import RoundedLinear, RoundWeight, find_rounded, weight_roundings
from strop.models.network import Network
from support.lora import build_with_adapters
from support.models import build


def tenths(tensor: Tensor) -> Tensor:
    return (tensor * 10).round() / 10


class TenthsLinear(RoundedLinear):
    """Weights in tenths, and inputs where ``coarse_inputs`` is set."""

    rounded_by = "policy.tenths"
    coarse_inputs: bool

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.round_inputs(x), self.rounded_weight(x.dtype), self.bias)

    @property
    def rounds_inputs(self) -> bool:
        return self.coarse_inputs

    def round_inputs(self, x: Tensor) -> Tensor:
        return tenths(x) if self.coarse_inputs else x

    def rounded_weight(self, dtype: torch.dtype) -> Tensor:
        return tenths(self.weight).to(dtype)

    def round_full_weight(self, weight: Tensor) -> Tensor:
        return tenths(weight).detach()

    def sent_roundings(self) -> Mapping[str, RoundWeight]:
        return {"weight": tenths}


def in_tenths(model: Any, *, inputs: bool = False) -> Any:
    for name, module in model.named_modules():
        if type(module) is nn.Linear and "up_proj" in name and "lora" not in name:
            module.__class__ = TenthsLinear
            module.__dict__["coarse_inputs"] = inputs
    return model


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("adapters", [False, True])
@torch.no_grad()
def test_copies_of_an_engine_compute_what_the_layers_compute(adapters: bool, inputs: bool) -> None:
    model = in_tenths(build_with_adapters("llama") if adapters else build("llama"), inputs=inputs)
    linears = FastLinears(model, torch.float32, prepack=True)
    layers = [layer.module for layer in linears.layers if isinstance(layer.linear, TenthsLinear)]
    x = torch.randn(7, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = [layer(x) for layer in layers]
    linears.enable()
    assert layers and not linears.find_stale_copies()
    for layer, values in zip(layers, expected, strict=True):
        assert "forward" in vars(layer) and torch.allclose(layer(x), values, atol=1e-5)


def test_engines_are_sent_rounded_weights_under_the_names_of_the_plain_model() -> None:
    model = in_tenths(build("llama"))
    names = {name for name, _ in build("llama").named_parameters() if "up_proj" in name}
    assert set(weight_roundings(model)) == set(merged_roundings(model)) == names


def test_an_adapter_is_added_to_the_rounded_weight() -> None:
    model = in_tenths(build_with_adapters("llama"))
    layer = next(layer for layer in lora_layers(model) if isinstance(layer.base, TenthsLinear))
    change = layer.scale * layer.up.detach() @ layer.down.detach()
    assert torch.allclose(layer.merged_weight(), tenths(layer.base.weight.detach()) + change)
    assert f"{layer.name}.weight" in weight_roundings(model) and f"{layer.name}.weight" not in merged_roundings(model)


def test_what_bypasses_the_layers_says_the_key_that_made_them() -> None:
    network = Network(in_tenths(build("llama"), inputs=True), packed=True)
    said = (fast_layers.find_obstacle(network), layer_compilation.find_obstacle(network, known_only=False))
    assert said == ("policy.tenths rounds the inputs of layers", "policy.tenths rounds weights and inputs in the modules")
    network = Network(in_tenths(build("llama")), packed=True)
    assert fast_layers.find_obstacle(network) is None and find_rounded(network.model, inputs=True) is None
