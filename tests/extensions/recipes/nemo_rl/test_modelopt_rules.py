"""Recipes with quantisation-aware training: what becomes of ModelOpt's keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.config import load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.extensions.recipes.difference import Effect
from strop.problems import ConfigError

QUANTISED = """
policy:
  quant_cfg: {quant_cfg}
  quant_calib_data: {calib_data}
  quant_calib_size: 16
  quant_batch_size: 1
  disable_modelopt_layer_spec: true
  generation: {{quant_cfg: {engine}, real_quant: {real}, real_quant_ignore: [lm_head], real_quant_export_cpu_offload: true}}
"""
TWO_GPUS = ("policy.megatron_cfg.tensor_model_parallel_size=2", "cluster.gpus_per_node=2")
PATTERNS = (
    "quant_cfg:\n  - {quantizer_name: '*', enable: false}\n  - {quantizer_name: '*mlp*weight_quantizer', cfg: {num_bits: e4m3}}\n"
)


def load(folder: Path, *overrides: str, **values: Any) -> Any:
    settings = {"quant_cfg": "NVFP4_DEFAULT_CFG", "calib_data": "random", "real": "true", **values}
    settings.setdefault("engine", settings["quant_cfg"])
    path = folder / "recipe.yaml"
    path.write_text(_with_model(QUANTISED.format(**settings)))
    return load_config(path, overrides, root=TRAINING_RUNS["grpo"])


def _with_model(text: str) -> str:
    data = "data: {train: {env_name: arithmetic}, validation: null}\nenv: {arithmetic: {}}\ngrpo: {val_period: 0}\n"
    return data + text.replace("policy:\n", "policy:\n  model_name: m\n")


def effects(loaded: Any) -> dict[str, Effect]:
    return {difference.key: difference.effect for difference in loaded.differences}


def test_the_engine_samples_with_what_the_learner_rounds(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    assert loaded.config.policy.quant_cfg == "NVFP4_DEFAULT_CFG"
    assert (loaded.config.policy.quant_calib_data, loaded.config.policy.quant_calib_size) == ("random", 16)
    found = effects(loaded)
    assert found["policy.generation.quant_cfg"] is Effect.UNUSED
    assert found["policy.generation.real_quant"] is found["policy.generation.real_quant_ignore"] is Effect.CHANGED
    assert found["policy.disable_modelopt_layer_spec"] is Effect.UNUSED


def test_a_file_is_found_from_the_folder_that_the_library_is_run_from(tmp_path: Path) -> None:
    file = tmp_path / "examples" / "quant.yaml"
    file.parent.mkdir()
    file.write_text(PATTERNS)
    recipes = tmp_path / "examples" / "configs"
    recipes.mkdir()
    loaded = load(recipes, quant_cfg="examples/quant.yaml", calib_data="null")
    assert loaded.config.policy.quant_cfg == str(file)


def test_the_torch_learner_trains_what_megatron_core_cannot_round(tmp_path: Path) -> None:
    loaded = load(tmp_path, "policy.megatron_cfg.enabled=true", *TWO_GPUS)
    assert loaded.config.policy.backend == "torch" and not loaded.config.policy.megatron_cfg.enabled
    assert loaded.config.policy.dtensor_cfg.tensor_parallel_size == 2
    assert effects(loaded)["policy.megatron_cfg.enabled"] is Effect.CHANGED
    with pytest.raises(ConfigError, match="Megatron Core's layers use unrounded weights"):
        load(tmp_path, "policy.megatron_cfg.enabled=true", "policy.backend=megatron")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.exact_on_policy=true", "rounded in passes that have no exact form"),
        ("policy.compile=true", "a compiled layer would use unrounded weights"),
        ("policy.quant_cfg=FP8_DEFAULT", "Did you mean FP8_DEFAULT_CFG"),
        (
            "policy.generation.quantization={format: fp8_block, emulate: true}",
            "rounds weights to nvfp4, and the engine rounds them to",
        ),
    ],
)
def test_what_quantisation_does_not_go_together_with_is_refused(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, override)


def test_adapters_beside_rounded_inputs_need_an_engine_in_the_learner_s_process(tmp_path: Path) -> None:
    lora = "policy.dtensor_cfg.lora_cfg.enabled=true"
    assert load(tmp_path, lora).config.policy.dtensor_cfg.lora_cfg.enabled
    with pytest.raises(ConfigError, match="torch engines in other processes have the adapters merged"):
        load(tmp_path, lora, "cluster.backend=ray")
