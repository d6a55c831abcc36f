"""``policy.quant_cfg``: names and files of ModelOpt, and which tensors of which layers they quantise."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.config import TRAINING_RUNS
from strop.config.source.keys import find_nearest_keys
from strop.extensions.labs.fake_quant.modelopt_config import (
    PRESETS,
    REFUSED_PRESETS,
    QuantConfigError,
    QuantizerRules,
    other_names,
    read_quant_config,
)

LAYER = "model.layers.1"
NVFP4 = "{num_bits: e2m1, block_sizes: {-1: 16, type: dynamic, scale_bits: e4m3}}"


def formats(rules: QuantizerRules, layer: str) -> tuple[str | None, str | None]:
    weight, inputs = rules.weight_format(layer), rules.input_format(layer)
    return None if weight is None else weight.name, None if inputs is None else inputs.name


def write(folder: Path, *entries: str, head: str = "algorithm: max") -> str:
    path = folder / "quant.yaml"
    path.write_text(f"quantize:\n  {head}\n  quant_cfg:\n" + "\n".join(f"    - {entry}" for entry in entries))
    return str(path)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_leaves_the_output_layer_and_routers_alone(name: str) -> None:
    rules = read_quant_config(name)
    for layer in ("lm_head", f"{LAYER}.mlp.gate", f"{LAYER}.block_sparse_moe.gate", f"{LAYER}.mlp.shared_expert_gate"):
        assert formats(rules, layer) == (None, None)
    assert rules.weight_format(f"{LAYER}.mlp.experts.0.down_proj") is not None


def test_presets_say_what_modelopt_says_of_them() -> None:
    down, query = f"{LAYER}.mlp.down_proj", f"{LAYER}.self_attn.q_proj"
    expected = {
        "FP8_DEFAULT_CFG": (("fp8_tensor", "fp8_tensor"), ("fp8_tensor", "fp8_tensor")),
        "FP8_PER_CHANNEL_PER_TOKEN_CFG": (("fp8_row", "fp8_row"), ("fp8_row", "fp8_row")),
        "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": (("fp8_block", None), ("fp8_block", None)),
        "MXFP8_DEFAULT_CFG": (("mxfp8", "mxfp8"), ("mxfp8", "mxfp8")),
        "NVFP4_DEFAULT_CFG": (("nvfp4", "nvfp4"), ("nvfp4", "nvfp4")),
        "NVFP4_MLP_ONLY_CFG": (("nvfp4", "nvfp4"), (None, None)),
        "NVFP4_MLP_WEIGHT_ONLY_CFG": (("nvfp4_32", None), (None, None)),
        "W4A8_NVFP4_FP8_CFG": (("nvfp4_32", "fp8_tensor"), ("nvfp4_32", "fp8_tensor")),
        "NVFP4_EXPERTS_ONLY_CFG": ((None, None), (None, None)),
        "MAMBA_MOE_FP8_AGGRESSIVE_CFG": (("fp8_tensor", "fp8_tensor"), (None, None)),
    }
    for name, (of_mlp, of_attention) in expected.items():
        rules = read_quant_config(name)
        assert (formats(rules, down), formats(rules, query)) == (of_mlp, of_attention), name


def test_scales_of_whole_inputs_are_calibrated_and_those_of_tokens_and_blocks_are_not() -> None:
    calibrated = {name for name in PRESETS if read_quant_config(name).may_calibrate}
    assert {"FP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG", "W4A8_NVFP4_FP8_CFG"} <= calibrated
    assert not calibrated & {"FP8_PER_CHANNEL_PER_TOKEN_CFG", "MXFP8_DEFAULT_CFG", "W4A16_NVFP4_CFG", "NVFP4_MLP_WEIGHT_ONLY_CFG"}


def test_a_rule_for_the_name_of_a_layer_in_megatron_or_vllm_is_one_for_hugging_faces() -> None:
    assert f"{LAYER}.self_attention.linear_qkv" in other_names(f"{LAYER}.self_attn.q_proj")
    assert f"{LAYER}.mlp.linear_fc1" in other_names(f"{LAYER}.mlp.up_proj")
    assert f"{LAYER}.block_sparse_moe.experts.0.linear_fc2" in other_names(f"{LAYER}.mlp.experts.0.down_proj")


def test_later_entries_of_a_file_win(tmp_path: Path) -> None:
    rules = read_quant_config(
        write(
            tmp_path,
            "{quantizer_name: '*', enable: false}",
            f"{{quantizer_name: '*weight_quantizer', cfg: {NVFP4}}}",
            "{quantizer_name: '*input_quantizer', cfg: {num_bits: [4, 3]}}",
            "{quantizer_name: '*lm_head*', enable: false}",
            "{quantizer_name: '*linear_fc1.input_quantizer', enable: false}",
            "{quantizer_name: '*.layers.1.*', enable: false}",
            "{parent_class: nn.BatchNorm1d, quantizer_name: '*', enable: false}",
        )
    )
    assert formats(rules, "model.layers.0.mlp.down_proj") == ("nvfp4", "fp8_tensor")
    assert formats(rules, "model.layers.0.mlp.up_proj") == ("nvfp4", None)
    assert formats(rules, "model.layers.1.mlp.down_proj") == (None, None)
    assert formats(rules, "model.layers.10.mlp.down_proj") == ("nvfp4", "fp8_tensor")


def test_the_older_form_of_a_file_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(
        f"quant_cfg:\n  default: {{enable: false}}\n  '*weight_quantizer': {NVFP4}\n  '*lm_head*': {{enable: false}}\nalgorithm: max\n"
    )
    assert formats(read_quant_config(str(path)), f"{LAYER}.mlp.up_proj") == ("nvfp4", None)


@pytest.mark.parametrize("name", REFUSED_PRESETS)
def test_a_preset_that_is_not_here_says_what_it_needs(name: str) -> None:
    with pytest.raises(QuantConfigError, match=f"found {name}, which .* not in this version") as error:
        read_quant_config(name)
    assert "FP8_DEFAULT_CFG" in error.value.fix


def test_a_wrong_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(QuantConfigError, match="neither a configuration of ModelOpt") as error:
        read_quant_config("NVFP4_DEFAUL_CFG")
    assert "NVFP4_DEFAULT_CFG" in error.value.fix


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{quantizer_name: '*weight_quantizer', cfg: {num_bits: 4}}", "not in this version"),
        ("{quantizer_name: '*weight_quantizer', cfg: {num_bits: e2m1, block_sizes: {-1: 16, type: static, scale_bits: e4m3}}}",
         "not in this version"),
        ("{quantizer_name: '*input_quantizer', cfg: {num_bits: e4m3, type: dynamic}}", "not in this version"),
        ("{quantizer_name: '*output_quantizer', cfg: {num_bits: e4m3}}", "outputs of layers"),
        ("{quantizer_name: '*', cfg: {num_bits: e4m3}}", "outputs of layers"),
        ("{quantizer_name: '*[kv]_bmm_quantizer', cfg: {num_bits: e4m3}}", "keys of attention"),
        ("{quantizer_name: '*weight_quantizer', cfg: {num_bits: e4m3}}", "the output layer"),
        ("{quantizer_name: '*', enable: false}", "quantises nothing"),
        ("{quantizer: '*', enable: false}", "has no quantizer_name"),
        ("{quantizer_name: '*', enabled: false}", "which is not known"),
    ],
)  # fmt: skip
def test_what_a_file_asks_for_and_is_not_here_is_refused(entry: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(QuantConfigError, match=message):
        read_quant_config(write(tmp_path, entry))


def test_an_algorithm_that_searches_scales_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuantConfigError, match="awq_lite"):
        read_quant_config(write(tmp_path, "{quantizer_name: '*', enable: false}", head="algorithm: awq_lite"))


def test_the_key_of_another_section_is_answered_with_the_one_that_was_meant() -> None:
    assert find_nearest_keys(["policy", "generation", "quant_cfg"], TRAINING_RUNS["grpo"])[:1] == ("policy.quant_cfg",)
