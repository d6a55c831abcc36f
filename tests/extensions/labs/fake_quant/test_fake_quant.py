"""Fake quantisation of a model: what the learner computes with is what an engine receives, to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.extensions.labs.fake_quant.apply_fake_quant import apply_fake_quant, iter_static_inputs
from strop.extensions.labs.fake_quant.fake_quant_linear import FORMATS, FakeQuantLinear, TensorQuantizer
from strop.extensions.labs.fake_quant.modelopt_config import read_quant_config
from strop.models.layers.rounded_layers import weight_roundings
from strop.models.quantization.number_format import round_trip
from support.lora import build_with_adapters
from support.models import build

WEIGHTS_ALONE = ("W4A16_NVFP4_CFG", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "MXFP4_MLP_WEIGHT_ONLY_CFG")
FAMILIES = [
    *("llama", "gpt_oss", "qwen3_moe"),
    *(pytest.param(family, marks=pytest.mark.exhaustive) for family in ("qwen2", "gemma2", "mixtral")),
]
TOKENS = torch.arange(1, 24)[None]


def quantized(family: str, source: str) -> Any:
    model = build(family)
    apply_fake_quant(model, read_quant_config(source))
    for _, quantizer in iter_static_inputs(model):
        quantizer.amax = 3.0
    return model


def as_sent(model: Any, plain: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    roundings = weight_roundings(model)
    return {
        name: roundings[name](weight.to(dtype)) if name in roundings else weight for name, weight in plain.state_dict().items()
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("source", WEIGHTS_ALONE)
def test_a_plain_model_with_the_weights_that_are_sent_computes_the_same_bits(family: str, source: str) -> None:
    model, plain = quantized(family, source), build(family)
    plain.load_state_dict(as_sent(model, plain))
    assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
    assert not torch.equal(model(TOKENS).logits, build(family)(TOKENS).logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("source", ["MXFP8_DEFAULT_CFG", "FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG", "NVFP4_DEFAULT_CFG"])
def test_an_engine_that_rounds_inputs_of_rounded_weights_computes_the_same_bits(family: str, source: str) -> None:
    model, engine = quantized(family, source), build(family)
    engine.load_state_dict(as_sent(model, engine))
    apply_fake_quant(engine, read_quant_config(source), keeps_rounded=True)
    for _, quantizer in iter_static_inputs(engine):
        quantizer.amax = 3.0
    assert torch.equal(model(TOKENS).logits, engine(TOKENS).logits)


def test_under_autocast_the_weight_is_cast_first_and_rounded_then() -> None:
    """As an engine does that receives bfloat16."""
    model, plain = quantized("llama", "W4A16_NVFP4_CFG"), build("llama")
    plain.load_state_dict(as_sent(model, plain, torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)


def test_the_gradient_is_that_of_a_plain_model_with_the_rounded_weights() -> None:
    model, plain = quantized("qwen3_moe", "W4A16_NVFP4_CFG"), build("qwen3_moe")
    plain.load_state_dict(as_sent(model, plain))
    for each in (model, plain):
        each(TOKENS).logits.square().mean().backward()
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, expected[name].grad), name  # type: ignore[arg-type]


def test_the_gradient_of_rounded_inputs_passes_through_also_where_they_saturate() -> None:
    quantizer = TensorQuantizer(FORMATS["fp8_tensor"], amax=1.0)
    x = torch.tensor([[0.3, -5.0]], requires_grad=True)
    rounded = quantizer.round_inputs(x)
    assert rounded.detach().abs().max() == 1.0
    rounded.sum().backward()
    assert torch.equal(x.grad, torch.ones(1, 2))  # type: ignore[arg-type]


def test_parameters_keep_their_names_and_their_precision() -> None:
    model, plain = quantized("qwen3_moe", "NVFP4_DEFAULT_CFG"), build("qwen3_moe")
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(weight, plain.state_dict()[name]) for name, weight in model.state_dict().items())


def test_a_copy_of_the_model_is_quantised_too() -> None:
    model = quantized("llama", "MXFP8_DEFAULT_CFG")
    assert torch.equal(copy.deepcopy(model)(TOKENS).logits, model(TOKENS).logits)


def test_each_expert_has_a_scale_of_its_own() -> None:
    model = quantized("qwen3_moe", "W4A16_NVFP4_CFG")
    name, weight = next((name, each) for name, each in model.state_dict().items() if name.endswith("experts.down_proj"))
    rounded = weight_roundings(model)[name](weight)
    assert torch.equal(rounded[1], round_trip(weight[1], FORMATS["nvfp4"]))


def test_blocks_of_transposed_experts_run_along_the_inputs() -> None:
    model = quantized("gpt_oss", "MXFP4_DEFAULT_CFG")
    name, weight = next((name, each) for name, each in model.state_dict().items() if name.endswith("experts.down_proj"))
    assert torch.equal(weight_roundings(model)[name](weight), round_trip(weight.mT, FORMATS["mxfp4_ceil"]).mT)


def test_adapters_stay_as_they_are_and_their_base_is_rounded() -> None:
    from strop.models.adapters import lora_layers, merged_roundings

    model = build_with_adapters("llama", dim=2, alpha=4, target_modules=("q_proj", "down_proj"))
    apply_fake_quant(model, read_quant_config("W4A16_NVFP4_CFG"))
    for layer in lora_layers(model):
        assert isinstance(layer.base, FakeQuantLinear)
        assert not any(
            isinstance(each, FakeQuantLinear) for side in ("lora_A", "lora_B") for each in getattr(layer.module, side).modules()
        )
        expected = round_trip(layer.base.weight, FORMATS["nvfp4"]) + layer.scale * layer.up @ layer.down
        assert torch.allclose(layer.merged_weight(), expected, atol=1e-6)
        assert f"{layer.name}.weight" in weight_roundings(model)
        assert f"{layer.name}.weight" not in merged_roundings(model)


def test_rules_that_match_no_layer_are_refused() -> None:
    with pytest.raises(ValueError, match="matches no linear layer of LlamaForCausalLM"):
        apply_fake_quant(build("llama"), read_quant_config("NVFP4_EXPERTS_ONLY_CFG"))


def test_what_was_quantised_is_said() -> None:
    summary = apply_fake_quant(build("llama"), read_quant_config("NVFP4_MLP_ONLY_CFG"))
    assert str(summary) == "rounded weights: 6 in nvfp4; rounded inputs: 6 in nvfp4; 8 linear layers stay as they are"
