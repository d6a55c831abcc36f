"""Models, engines and services of NeMo-RL's recipes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop import packages
from strop.config import ConfigError, LoadedConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS, GrpoRunConfig
from strop.extensions.recipes.rules import Effect
from strop.runs.lifecycle import make_services

BASE = ["policy.model_name=m", "data.train.env_name=math", "env.math={}"]


def load(*overrides: str, section: str = "grpo") -> LoadedConfig[Any]:
    return load_config(None, [*BASE, *overrides], root=TRAINING_RUNS[section])


def effect_of(loaded: LoadedConfig[Any], key: str) -> Effect:
    (effect,) = {difference.effect for difference in loaded.differences if difference.key == key}
    return effect


def refusal(*overrides: str, section: str = "grpo") -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, section=section)
    (problem,) = caught.value.problems
    return str(problem)


def test_dynamic_batching_cuts_by_its_tokens_and_packs() -> None:
    dynamic = [
        "policy.dynamic_batching={enabled: true, train_mb_tokens: 1024, logprob_mb_tokens: 2048, sequence_length_round: 64}"
    ]
    loaded = load("policy.sequence_packing={enabled: false, train_mb_tokens: 600}", *dynamic)
    packing = loaded.config.policy.sequence_packing
    assert (packing.enabled, packing.train_mb_tokens, packing.logprob_mb_tokens) == (True, 1024, 2048)
    assert effect_of(loaded, "policy.dynamic_batching.enabled") is Effect.RENAMED
    critic = load("value.dynamic_batching={enabled: true, train_mb_tokens: 1024}", section="ppo").config.value
    assert critic.sequence_packing.enabled and critic.batching.train_mb_tokens == 1024


def test_a_load_balancing_loss_that_is_switched_off_is_left_out_and_another_is_refused() -> None:
    key = "policy.hf_config_overrides.text_config.router_aux_loss_coef"
    loaded = load(f"{key}=0.0", "cluster.master_port_range_low=1400")
    assert effect_of(loaded, key) is Effect.UNUSED and not loaded.config.policy.hf_config_overrides
    assert "Set policy.router_losses.aux_loss_coeff" in refusal(
        "policy.hf_config_overrides.router_aux_loss_coef=0.01", "cluster.master_port_range_low=1400"
    )


def test_environment_variables_go_to_the_learner_s_processes_as_text() -> None:
    loaded = load(
        "cluster.backend=ray",
        "cluster.roles.learner.env_vars={A: mine}",
        "policy.dtensor_cfg.env_vars={A: theirs, B: 1, PYTORCH_CUDA_ALLOC_CONF: ''}",
    )
    assert loaded.config.cluster.roles.learner.env_vars == {"A": "mine", "B": "1", "PYTORCH_CUDA_ALLOC_CONF": ""}
    assert effect_of(loaded, "policy.dtensor_cfg.env_vars") is Effect.RENAMED
    assert effect_of(load("policy.dtensor_cfg.env_vars=null"), "policy.dtensor_cfg.env_vars") is Effect.UNUSED


@pytest.mark.parametrize(
    "key",
    [
        "policy.sequence_packing.fuse_loss=true",
        "policy.offload_optimizer_for_logprob=true",
        "policy.tokenizer.use_fastokens=true",
        "policy.refit_buffer_size_gb=4",
        "policy.dtensor_cfg.clear_cache_every_n_steps=1",
        "policy.dtensor_cfg.automodel_kwargs={force_hf: true}",
        "policy.dtensor_cfg.automodel_kwargs={use_liger_kernel: false, attn_implementation: eager, use_sdpa_patching: false}",
        "policy.dtensor_cfg.automodel_kwargs.backend={attn: te, dispatcher: deepep, fake_balanced_gate: false, gate_precision: float64}",
        "policy.dtensor_cfg.moe_parallelizer={ignore_router_for_ac: true}",
        "policy.dtensor_cfg.lora_cfg.lora_dtype=null",
        "policy.reward_model_cfg={enabled: false, reward_model_type: regression}",
    ],
)
def test_a_key_about_speed_or_memory_changes_nothing(key: str) -> None:
    loaded = load(key)
    assert loaded.config == load().config
    assert {difference.effect for difference in loaded.differences} == {Effect.UNUSED}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("policy.dtensor_cfg.automodel_kwargs.backend.fake_balanced_gate=true", "replaces the router"),
        ("policy.dtensor_cfg.automodel_kwargs.new_option=3", "is not known"),
        ("policy.dtensor_cfg.automodel_kwargs.freeze_config.freeze_language_model=true", "can be frozen"),
        ("policy.pretrained_checkpoint={path: /x}", "Set policy.model_name"),
        ("policy.reward_model_cfg={enabled: true}", "strop rm"),
    ],
)
def test_a_key_that_asks_for_something_else_is_refused_with_what_to_set(key: str, said: str) -> None:
    assert said in refusal(key)


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


def load_quantized(folder: Path, *overrides: str, **values: Any) -> Any:
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
    loaded = load_quantized(tmp_path)
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
    loaded = load_quantized(recipes, quant_cfg="examples/quant.yaml", calib_data="null")
    assert loaded.config.policy.quant_cfg == str(file)


def test_the_torch_learner_trains_what_megatron_core_cannot_round(tmp_path: Path) -> None:
    loaded = load_quantized(tmp_path, "policy.megatron_cfg.enabled=true", *TWO_GPUS)
    assert loaded.config.policy.backend == "torch" and not loaded.config.policy.megatron_cfg.enabled
    assert loaded.config.policy.dtensor_cfg.tensor_parallel_size == 2
    assert effects(loaded)["policy.megatron_cfg.enabled"] is Effect.CHANGED
    with pytest.raises(ConfigError, match="Megatron Core's layers use unrounded weights"):
        load_quantized(tmp_path, "policy.megatron_cfg.enabled=true", "policy.backend=megatron")


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
        load_quantized(tmp_path, override)


def test_adapters_beside_rounded_inputs_need_an_engine_in_the_learner_s_process(tmp_path: Path) -> None:
    lora = "policy.dtensor_cfg.lora_cfg.enabled=true"
    assert load_quantized(tmp_path, lora).config.policy.dtensor_cfg.lora_cfg.enabled
    with pytest.raises(ConfigError, match="torch engines in other processes have the adapters merged"):
        load_quantized(tmp_path, lora, "cluster.backend=ray")


RECIPE = """
defaults: base.yaml
logger:
  log_dir: logs/dev
  num_val_samples_to_print: 0
  wandb_enabled: true
  swanlab_enabled: true
  tensorboard_enabled: true
  mlflow_enabled: true
  monitor_gpus: true
  wandb: {project: grpo-dev, name: first, entity: team, tags: [a], group: seeds, id: abc, resume: allow, save_code: true}
  swanlab: {project: grpo-dev, experiment_name: first, description: why, workspace: team, logdir: x}
  tensorboard: {log_dir: tb_logs}
  mlflow: {experiment_name: null, run_name: first, tracking_uri: "http://localhost:5000", artifact_location: null, run_id: null}
  gpu_monitoring: {collection_interval: 10, flush_interval: 10}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedConfig[Any]:
    monkeypatch.setattr(packages, "is_installed", lambda name: True)
    (tmp_path / "base.yaml").write_text("policy: {model_name: m}\ndata: {train: {env_name: arithmetic}}\nenv: {arithmetic: {}}\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return load_config(tmp_path / "recipe.yaml", [f"logger.log_dir={tmp_path}"], root=GrpoRunConfig, check=False)


def test_every_service_of_a_recipe_is_on_under_its_names(recipe: LoadedConfig[Any]) -> None:
    logger = recipe.config.logger
    assert set(logger.services) == {"tensorboard", "wandb", "mlflow", "swanlab"}
    assert (logger.wandb.project, logger.wandb.name, logger.wandb.entity, logger.wandb.group) == (
        "grpo-dev",
        "first",
        "team",
        "seeds",
    )
    assert (logger.swanlab.project, logger.swanlab.name, logger.swanlab.notes) == ("grpo-dev", "first", "why")
    assert (logger.mlflow.run_name, logger.mlflow.tracking_uri) == ("first", "http://localhost:5000")
    assert logger.mlflow.experiment_name is None and logger.tensorboard.log_dir == "tb_logs"


def test_arguments_of_a_service_that_have_no_meaning_here_are_named(recipe: LoadedConfig[Any]) -> None:
    named = {each.key: each.effect for each in recipe.differences}
    for key in ("wandb.id", "wandb.resume", "wandb.save_code", "swanlab.logdir"):
        assert named[f"logger.{key}"] is Effect.UNUSED
    assert named["logger.swanlab.experiment_name"] is Effect.RENAMED


def test_projects_that_a_recipe_leaves_open_are_those_of_the_environment(
    recipe: LoadedConfig[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    off = {f"{name}_enabled": False for name in ("wandb", "swanlab", "tensorboard")}
    config = replace(recipe.config, logger=replace(recipe.config.logger, **off))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from-outside")
    (tracker,) = make_services(config)
    assert vars(tracker)["_experiment"] == "from-outside"
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    (tracker,) = make_services(config)
    assert vars(tracker)["_experiment"] == "strop"


def test_a_project_that_swanlab_would_not_take_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda name: True)
    base = ["policy.model_name=m", "data.train.env_name=arithmetic", "env.arithmetic={}", "logger.swanlab.project=my project"]
    with pytest.raises(ConfigError, match=r"logger\.swanlab\.project: found 'my project', but SwanLab takes at most 100 letters"):
        load_config(None, [*base, "logger.swanlab_enabled=true"], root=GrpoRunConfig)


SECTION = "policy.generation.sglang_cfg"


def load_sglang(*overrides: str) -> LoadedConfig[Any]:
    given = ["policy.model_name=m", "policy.generation.backend=sglang", *(f"{SECTION}.{each}" for each in overrides)]
    return load_config(None, given, root=TRAINING_RUNS["grpo"], check=False)


def test_the_gpus_of_all_engines_and_of_each_say_how_many_engines_there_are() -> None:
    loaded = load_sglang("tp_size=4", "sglang_server_config.num_gpus=16", "sglang_server_config.num_gpus_per_engine=4")
    assert loaded.config.policy.generation.sglang_cfg.num_engines == 4


def test_arguments_of_the_server_are_passed_on_and_null_ones_are_its_choice() -> None:
    loaded = load_sglang("schedule_policy=lpm", "cuda_graph_max_bs=null")
    assert loaded.config.policy.generation.sglang_kwargs == {"schedule_policy": "lpm"}


def test_what_changes_nothing_of_the_training_is_left_out_and_said() -> None:
    unused = ("random_seed=42", "allow_auto_truncate=true", "sglang_server_config.sglang_server_concurrency=9", "model_path=m")
    loaded = load_sglang(*unused, "sglang_router_config.use_external_router=false")
    named = {difference.key for difference in loaded.differences if difference.effect is Effect.UNUSED}
    assert {f"{SECTION}.{each.partition('=')[0]}" for each in unused} <= named


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("sglang_router_config.use_external_router=true", "Strop's own pool"),
        ("model_path=other", "engines serve the policy"),
        ("torchao_config=int8wo", "not quantised ones"),
        ("sglang_server_config.num_gpus_per_engine=2", "a GPU for each rank"),
    ],
)
def test_what_strop_would_not_do_is_refused(override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_sglang(override)
