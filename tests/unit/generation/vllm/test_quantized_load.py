"""Weights that a vLLM engine quantises as they arrive."""

from __future__ import annotations

import torch

from strop.generation.generation_config import GenerationConfig
from strop.generation.quantization_config import RolloutQuantizationConfig
from strop.generation.vllm.quantized.quantized_load import quantize_arriving
from strop.generation.vllm.vllm_config import VllmConfig
from strop.models.quantization.number_format import FP8_BLOCK, MXFP8, round_trip
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
    from strop.generation.vllm.quantized.fp8_launch import fp8_environment, make_fp8_args

    emulated = GenerationConfig(vllm_cfg=VllmConfig(precision="fp8"), quantization=RolloutQuantizationConfig(emulate=True))
    assert make_fp8_args(emulated, "") == {} == fp8_environment(emulated)
    assert emulated.vllm_cfg.dtype == "bfloat16"


def test_options_of_deep_gemm_reach_the_engine() -> None:
    from strop.generation.vllm.quantized.fp8_launch import fp8_environment

    fp8 = GenerationConfig(vllm_cfg=VllmConfig(precision="fp8", use_deep_gemm=True))
    assert fp8_environment(fp8) == {"VLLM_USE_DEEP_GEMM_E8M0": "0", "VLLM_USE_DEEP_GEMM": "1"}
    assert fp8_environment(GenerationConfig(vllm_cfg=VllmConfig(precision="fp8", is_mx=True))) == {}
