"""Weights that a vLLM engine quantises as they arrive."""

from __future__ import annotations

import pytest
import torch

from strop.generation.generation_config import GenerationConfig, RolloutQuantizationConfig
from strop.generation.quantized_rollouts import PlannedPrecision
from strop.generation.vllm.engine_weights import quantize_arriving
from strop.generation.vllm.vllm_config import VllmConfig
from strop.models.quantization.number_format import FP8_BLOCK, FP8_BLOCK_POW2, MXFP8, NumberFormat, round_trip
from strop.models.quantization.quantization_plan import make_plan

NAME, HEAD, EXPERTS = "model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.layers.0.mlp.experts.gate_up_proj"


def test_blocks_arrive_with_the_names_and_shapes_of_deepseeks_checkpoints() -> None:
    weight = torch.randn(200, 300).bfloat16()
    found = dict(quantize_arriving([(NAME, weight), (HEAD, weight)], make_plan(FP8_BLOCK), [NAME, HEAD]))
    assert list(found) == [NAME, f"{NAME}_scale_inv", HEAD] and found[HEAD] is weight
    assert found[NAME].dtype == torch.float8_e4m3fn and found[f"{NAME}_scale_inv"].shape == (2, 3)
    scales = found[f"{NAME}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    assert torch.equal((found[NAME].float() * scales).bfloat16(), round_trip(weight, FP8_BLOCK))


def test_the_scales_of_mxfp8_arrive_as_bytes() -> None:
    weight = torch.randn(8, 64).bfloat16()
    found = dict(quantize_arriving([(NAME, weight)], make_plan(MXFP8), [NAME]))
    scales = found[f"{NAME}_scale"]
    assert scales.dtype == torch.uint8 and scales.shape == (8, 2)
    values = found[NAME].float() * torch.ldexp(torch.ones(8, 2), scales.int() - 127).repeat_interleave(32, 1)
    assert torch.equal(values.bfloat16(), round_trip(weight, MXFP8))


def test_experts_in_one_tensor_become_the_matrices_of_a_checkpoint() -> None:
    stacked = torch.randn(2, 256, 128).bfloat16()
    found = dict(quantize_arriving([(EXPERTS, stacked)], make_plan(FP8_BLOCK), [EXPERTS]))
    prefix = "model.layers.0.mlp.experts"
    assert {name for name in found if not name.endswith("_inv")} == {
        f"{prefix}.{expert}.{part}.weight" for expert in (0, 1) for part in ("gate_proj", "up_proj")
    }
    assert found[f"{prefix}.1.up_proj.weight"].shape == (128, 128)


def test_an_emulated_engine_is_an_ordinary_one() -> None:
    from strop.generation.vllm.engine_args import fp8_environment, make_fp8_args

    emulated = GenerationConfig(vllm_cfg=VllmConfig(precision="fp8"), quantization=RolloutQuantizationConfig(emulate=True))
    assert make_fp8_args(emulated, "") == {} == fp8_environment(emulated)
    assert emulated.vllm_cfg.dtype == "bfloat16"


def test_options_of_deep_gemm_reach_the_engine() -> None:
    from strop.generation.vllm.engine_args import fp8_environment

    fp8 = GenerationConfig(vllm_cfg=VllmConfig(precision="fp8", use_deep_gemm=True))
    assert fp8_environment(fp8) == {"VLLM_USE_DEEP_GEMM_E8M0": "0", "VLLM_USE_DEEP_GEMM": "1"}
    assert fp8_environment(GenerationConfig(vllm_cfg=VllmConfig(precision="fp8", is_mx=True))) == {}


@pytest.mark.parametrize("number_format", [FP8_BLOCK, FP8_BLOCK_POW2, MXFP8], ids=lambda each: each.name)
@pytest.mark.parametrize("name", [NAME, EXPERTS])
def test_what_is_sent_quantised_arrives_as_what_is_quantised_on_arrival(number_format: NumberFormat, name: str) -> None:
    """To the bit, in half the bytes."""
    shape = (2, 256, 192) if name == EXPERTS else (200, 320)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    plan = make_plan(number_format)
    precision = PlannedPrecision(plan, torch.bfloat16, by_engine=True, packs=True)
    packed = precision.pack(weight)
    assert packed.dtype is torch.uint8 and packed.numel() == precision.packed_size(name, weight.shape)
    assert packed.numel() < (0.6 if number_format is MXFP8 else 0.51) * weight.nbytes
    here = dict(quantize_arriving([(name, weight)], plan, [name]))
    there = dict(quantize_arriving([(name, packed)], plan, [name]))
    assert list(here) == list(there)
    for part, tensor in here.items():
        assert tensor.dtype == there[part].dtype and torch.equal(tensor.view(torch.uint8), there[part].view(torch.uint8))


def test_experts_whose_halves_share_a_block_are_sent_as_numbers() -> None:
    precision = PlannedPrecision(make_plan(FP8_BLOCK), torch.bfloat16, by_engine=True, packs=True)
    assert precision.packed_size(EXPERTS, (4, 2 * 64, 128)) is None
    assert precision.packed_size(EXPERTS, (4, 2 * 128, 128)) is not None


def test_bytes_of_another_format_are_refused_on_arrival() -> None:
    packed = PlannedPrecision(make_plan(FP8_BLOCK), torch.bfloat16, by_engine=True, packs=True).pack(torch.ones(64, 64))
    with pytest.raises(ValueError, match=r"bytes arrived for a matrix \(64, 64\) in mxfp8"):
        dict(quantize_arriving([(NAME, packed)], make_plan(MXFP8), [NAME]))
