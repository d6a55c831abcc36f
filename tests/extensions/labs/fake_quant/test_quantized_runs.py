"""Whole runs with ``policy.quant_cfg``: sampler and learner compute with the same rounded weights and inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from loop.killing import Kill
from loop.kinds import assert_same_run
from loop.runs import grpo, metrics_of

pytestmark = pytest.mark.slow

SHORT: dict[str, Any] = {"grpo.val_period": 0, "checkpointing.enabled": False, "checkpointing.metric_name": None}
TWO: dict[str, Any] = {"cluster.backend": "ray", "cluster.gpus_per_node": 2}


def errors(folder: Path, name: str = "train/token_mult_prob_error") -> list[float]:
    return [line[name] - 1 for line in metrics_of(folder / "logs").values()]


def test_sampler_and_learner_agree_and_the_saved_weights_are_not_rounded(tiny: Path, tmp_path: Path) -> None:
    outcome = grpo(
        tiny, tmp_path, **{"policy.quant_cfg": "W4A16_NVFP4_CFG", "grpo.val_period": 0, "checkpointing.metric_name": None}
    )
    assert outcome.code == 0, outcome.err
    assert max(errors(tmp_path, "train/token_mult_prob_error_max")) < 1e-5
    weights = load_file(tmp_path / "results" / "step_6" / "policy" / "weights" / "model.safetensors")
    values = weights["model.layers.0.mlp.up_proj.weight"]
    assert len(values[0, :16].unique()) == 16, "a block of rounded ones has at most 15 values"


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("source", ["FP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG", "MXFP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG"])
def test_inputs_are_rounded_alike_too(source: str, precision: str, tiny: Path, tmp_path: Path) -> None:
    """In float32 the order of additions now and then puts a value on the other side of a boundary of rounding."""
    settings = {"policy.quant_cfg": source, "policy.quant_calib_data": "random", "policy.quant_calib_size": 4}
    outcome = grpo(tiny, tmp_path, **SHORT, **settings, **{"policy.precision": precision, "policy.quant_sequence_length": 32})
    assert outcome.code == 0, outcome.err
    assert max(errors(tmp_path)) < (1e-5 if precision == "bfloat16" else 2e-3)


BLOCKS = """
quant_cfg:
  - {quantizer_name: '*', enable: false}
  - {quantizer_name: '*weight_quantizer', cfg: {num_bits: e4m3, block_sizes: {-1: 128, -2: 128}}}
  - {quantizer_name: '*input_quantizer', cfg: {num_bits: e4m3, type: dynamic, block_sizes: {-1: 128}}}
  - {quantizer_name: '*lm_head*', enable: false}
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("fake", [True, False])
def test_fp8_rollouts_are_of_the_policy_where_the_learner_rounds_as_the_engine_does(
    fake: bool, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "blocks.yaml").write_text(BLOCKS)
    settings = {
        "policy.precision": "bfloat16",
        "policy.generation.quantization.format": "fp8_block",
        "policy.generation.quantization.emulate": True,
        "loss_fn.use_importance_sampling_correction": True,
        "loss_fn.truncated_importance_sampling_type": "tis",
        "loss_fn.truncated_importance_sampling_ratio": 2,
        "policy.quant_cfg": str(tmp_path / "blocks.yaml") if fake else None,
    }
    outcome = grpo(tiny, tmp_path, **SHORT, **settings)
    assert outcome.code == 0, outcome.err
    worst = max(errors(tmp_path))
    assert worst < 1e-4 if fake else worst > 3e-3


@pytest.mark.exhaustive
def test_a_killed_run_goes_on_to_the_bit(tiny: Path, tmp_path: Path) -> None:
    settings = {"policy.quant_cfg": "FP8_DEFAULT_CFG", "policy.quant_calib_data": "random", "policy.quant_calib_size": 4}
    assert grpo(tiny, tmp_path / "whole", **settings).code == 0
    assert grpo(tiny, tmp_path / "killed", before=Kill("at the optimizer step", 4), **settings).code != 0
    assert grpo(tiny, tmp_path / "killed", **settings).code == 0
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("W4A16_NVFP4_CFG", {}),
        ("NVFP4_DEFAULT_CFG", {}),
        ("W4A16_NVFP4_CFG", {"policy.dtensor_cfg.lora_cfg.enabled": True, "policy.dtensor_cfg.lora_cfg.dim": 4}),
    ],
)
def test_ranks_send_rounded_weights_to_an_engine_in_another_process(
    source: str, options: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    settings = {"policy.quant_cfg": source, "policy.quant_calib_data": "random", "policy.quant_calib_size": 4, **options}
    outcome = grpo(tiny, tmp_path, **SHORT, **TWO, **settings, **{"logger.console": "plain", "grpo.max_num_steps": 3})
    assert outcome.code == 0, outcome.err + outcome.out
    assert max(errors(tmp_path)) < (1e-5 if source == "W4A16_NVFP4_CFG" else 2e-3)
