"""Checkpoints with quantised weights are dequantised to the published formula while they are loaded, and saved as ordinary models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.models.loading import load_model
from strop.models.quantization.number_format import FP8_BLOCK, FP8_ROW, NumberFormat, quantize
from strop.models.quantization.quantized_checkpoint import QuantizedCheckpoint
from strop.models.value_network import load_classifier
from support.models import build

DEEPSEEK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
BLOCKS = NumberFormat("fp8_blocks_of_16", FP8_BLOCK.element, 16, 16)  # several blocks in a tiny weight


def save_fp8(folder: Path, family: str, number_format: NumberFormat = BLOCKS) -> dict[str, Tensor]:
    """Save a tiny model as DeepSeek-V3 is: weights in FP8 beside ``weight_scale_inv`` of each block. Return its dequantised weights."""
    build(family).save_pretrained(folder)
    stored, expected = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        expected[name] = stored[name] = weight
        if weight.dim() == 2 and "_proj" in name:
            quantized = quantize(weight, number_format)
            stored[name], stored[f"{name}_scale_inv"] = quantized.values, quantized.scales
            expected[name] = quantized.dequantize()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    add_section(folder, {**DEEPSEEK, "weight_block_size": [number_format.rows, number_format.columns]})
    return expected


def add_section(folder: Path, section: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_blocks_of_fp8_are_multiplied_by_their_scales(family: str, tmp_path: Path) -> None:
    expected = save_fp8(tmp_path / "quantised", family)
    model = load_model(str(tmp_path / "quantised"), dequantize=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_scales_of_rows_are_read_as_compressed_tensors_stores_them(tmp_path: Path) -> None:
    expected = save_fp8(tmp_path, "llama", FP8_ROW)
    stored = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("weight_scale_inv", "weight_scale"): tensor for name, tensor in stored.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    add_section(tmp_path, {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}})
    loaded = load_model(str(tmp_path), dequantize=True).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())


def test_a_classifier_is_made_of_dequantised_weights_too(tmp_path: Path) -> None:
    expected = save_fp8(tmp_path, "qwen3")
    model = load_classifier(str(tmp_path), dequantize=True)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, expected["model.layers.0.mlp.up_proj.weight"])


def test_a_weight_without_its_scale_is_refused(tmp_path: Path) -> None:
    save_fp8(tmp_path, "llama")
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuantizedCheckpoint, match=r"up_proj.weight is torch.float8_e4m3fn, without a scale"):
        load_model(str(tmp_path), dequantize=True)


def test_a_quantised_checkpoint_is_not_trained_unasked(tmp_path: Path) -> None:
    save_fp8(tmp_path, "qwen3")
    with pytest.raises(QuantizedCheckpoint, match=r"quantised \(fp8\), .* set policy.dequantize_base_checkpoint=true"):
        load_model(str(tmp_path))


def test_a_format_that_is_not_dequantised_is_refused(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    add_section(tmp_path, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(QuantizedCheckpoint, match="only compressed-tensors, fp8, mxfp4 are dequantised"):
        load_model(str(tmp_path), dequantize=True)


def test_a_checkpoint_without_quantised_weights_is_loaded_as_it_is(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    plain, asked = (load_model(str(tmp_path), dequantize=dequantize).state_dict() for dequantize in (False, True))
    assert all(torch.equal(weight, asked[name]) for name, weight in plain.items())


def test_experts_in_mxfp4_are_dequantised_as_gpt_oss_stores_them(tmp_path: Path) -> None:
    """Codes of two values in a byte, the first in the low half, and one byte with the exponent for each 32 inputs."""
    from transformers import AutoModelForCausalLM, GptOssConfig

    sizes = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = GptOssConfig(vocab_size=64, num_hidden_layers=1, num_local_experts=2, num_experts_per_tok=1, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    generator, values = torch.Generator().manual_seed(0), torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values, expected = torch.cat([values, -values]), {}
    for name in [each for each in stored if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 130, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = codes[..., ::2] | codes[..., 1::2] << 4, scales
        dense = values[codes.int()] * torch.exp2(scales.float() - 127)[..., None]
        expected[name] = dense.reshape(experts, outputs, inputs).mT
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    add_section(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    loaded = load_model(str(tmp_path), dequantize=True).state_dict()
    assert expected and all(torch.equal(loaded[name], weight) for name, weight in expected.items())
