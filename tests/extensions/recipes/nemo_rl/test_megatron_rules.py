"""Recipes that ask for Megatron Core: carried over, or with ``policy.backend=torch`` trained by the torch learner as they say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from strop import packages
from strop.config import ConfigError, LoadedConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.extensions.recipes.nemo_rl.megatron_rules import make_schedule_section
from strop.extensions.recipes.rules import Effect
from strop.learner.torch.schedules import make_schedule

RECIPE = """
grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4, max_num_steps: 20}
env: {math: {num_workers: 8}}
data: {train: {dataset_name: OpenMathInstruct-2, env_name: math}}
cluster: {gpus_per_node: 8, num_nodes: 2}
policy:
  model_name: m
  max_grad_norm: 1.0
  optimizer: null
  make_sequence_length_divisible_by: ${policy.megatron_cfg.tensor_model_parallel_size}
  dtensor_cfg: {enabled: false, tensor_parallel_size: 1, cpu_offload: true, lora_cfg: {enabled: true, dim: 4}}
  scheduler: [{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}, {milestones: []}]
  megatron_cfg:
    enabled: true
    empty_unused_memory_level: 1
    activation_checkpointing: true
    recompute_granularity: full
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 1
    context_parallel_size: 2
    expert_model_parallel_size: 1
    expert_tensor_parallel_size: 1
    sequence_parallel: true
    pipeline_dtype: ${policy.precision}
    freeze_moe_router: true
    moe_router_load_balancing_type: none
    moe_router_bias_update_rate: 0.0
    apply_rope_fusion: true
    mtp_num_layers: 0
    model_overrides: {}
    env_vars: {NCCL_NVLS_ENABLE: 0}
    peft: {enabled: false, target_modules: [], exclude_modules: [], dim: 8, alpha: 32, lora_dtype: None}
    optimizer: {optimizer: adam, lr: 3.0e-7, min_lr: 3.0e-8, weight_decay: 0.5, bf16: true, fp16: false, params_dtype: float32,
      adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-7, sgd_momentum: 0.9, clip_grad: 0.5, use_precision_aware_optimizer: true}
    scheduler: {start_weight_decay: 0.01, end_weight_decay: 0.01, weight_decay_incr_style: constant, lr_decay_style: constant,
      lr_decay_iters: 1000, lr_warmup_iters: 13, lr_warmup_init: 3.0e-8}
    distributed_data_parallel_config: {grad_reduce_in_fp32: false, overlap_grad_reduce: true}
    fp8_cfg: {enabled: false, fp8: e4m3}
"""
TORCH = "policy.backend=torch"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "grpo_megatron.yaml"
    path.write_text(RECIPE)
    return path


def load(path: Path, *overrides: str) -> LoadedConfig[Any]:
    return load_config(path, overrides, root=TRAINING_RUNS["grpo"])


def refusals(path: Path, *overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(path, *overrides)
    return {problem.key: str(problem) for problem in caught.value.problems}


def test_the_section_is_carried_over_for_megatron_core(recipe: Path) -> None:
    loaded = load(recipe)
    policy, options = loaded.config.policy, loaded.config.policy.megatron_cfg
    assert options.enabled and not policy.dtensor_cfg.enabled
    assert (options.tensor_model_parallel_size, options.context_parallel_size, options.sequence_parallel) == (2, 2, True)
    assert (options.optimizer.lr, options.optimizer.adam_beta2, options.optimizer.clip_grad) == (3e-7, 0.95, 0.5)
    assert (options.scheduler.start_weight_decay, options.scheduler.lr_warmup_init) == (0.01, 3e-8)
    assert loaded.config.cluster.roles.learner.env_vars == {"NCCL_NVLS_ENABLE": "0"}
    assert not [difference for difference in loaded.differences if difference.effect is Effect.CHANGED]


def test_policy_value_and_teacher_have_one_learner() -> None:
    base = ["policy.model_name=m", "data.train.env_name=math", "env.math={}"]
    on = [f"{model}.{key}" for model in ("policy", "value") for key in ("megatron_cfg.enabled=true", "dtensor_cfg.enabled=false")]
    config = load_config(None, [*base, *on], root=TRAINING_RUNS["ppo"]).config
    assert config.policy.megatron_cfg.enabled and config.value.megatron_cfg.enabled
    with pytest.raises(ConfigError, match="both are on the same ranks"):
        load_config(None, [*base, "policy.megatron_cfg.enabled=true"], root=TRAINING_RUNS["ppo"])
    critic = load_config(
        None, [*base, *on, TORCH, "value.megatron_cfg.optimizer.lr=1e-5"], root=TRAINING_RUNS["ppo"]
    ).config.value
    assert critic.dtensor_cfg.enabled and critic.optimizer.kwargs["lr"] == 1e-5


def test_a_teacher_for_megatron_core_goes_the_way_of_its_student() -> None:
    on = "megatron_cfg={enabled: true, tensor_model_parallel_size: 1, apply_rope_fusion: true, optimizer: {lr: 1e-5}}"
    base = ["policy.model_name=m", "teacher.model_name=t", "data.train.env_name=math", "env.math={}", f"teacher.{on}"]
    recipe = [*base, f"policy.{on}"]
    assert load_config(None, recipe, root=TRAINING_RUNS["distillation"]).config.teacher.megatron_cfg.enabled
    with pytest.raises(ConfigError, match=r"found true, but policy\.megatron_cfg\.enabled is false"):
        load_config(None, base, root=TRAINING_RUNS["distillation"])
    loaded = load_config(None, [*recipe, TORCH], root=TRAINING_RUNS["distillation"])
    assert loaded.config.policy.optimizer.kwargs["lr"] == 1e-5
    assert loaded.config.teacher.dtensor_cfg.tensor_parallel_size == 1
    assert "a teacher only scores" in {d.key: d.text for d in loaded.differences}["teacher.megatron_cfg"]


def test_a_teacher_for_megatron_core_is_divided_as_megatron_cfg_says_and_not_as_its_switched_off_section(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    on = "megatron_cfg: {enabled: true, tensor_model_parallel_size: %d}\n"
    file.write_text(
        "distillation: {}\ndata: {train: {env_name: math}}\nenv: {math: {}}\ncluster: {gpus_per_node: 4}\n"
        f"policy:\n  model_name: m\n  dtensor_cfg: {{enabled: false}}\n  {on % 1}"
        f"teacher:\n  model_name: t\n  dtensor_cfg: {{enabled: false, tensor_parallel_size: 4, context_parallel_size: 2}}\n  {on % 2}"
    )
    teacher = load_config(file, root=TRAINING_RUNS["distillation"]).config.teacher
    assert teacher.megatron_cfg.tensor_model_parallel_size == 2 and teacher.dtensor_cfg.tensor_parallel_size == 1
    sizes = load_config(file, [TORCH], root=TRAINING_RUNS["distillation"]).config.teacher.dtensor_cfg
    assert (sizes.tensor_parallel_size, sizes.context_parallel_size) == (2, 1)


def test_a_model_that_both_learners_are_to_train_is_refused_as_by_nemo_rl(recipe: Path) -> None:
    refused = refusals(recipe, "policy.dtensor_cfg.enabled=true")
    assert (
        list(refused) == ["policy.megatron_cfg.enabled"] and "a model has one learner" in refused["policy.megatron_cfg.enabled"]
    )
    both = load(recipe, "policy.dtensor_cfg.enabled=true", "policy.backend=megatron").config.policy
    assert both.megatron_cfg.enabled and not both.dtensor_cfg.enabled


def test_the_backend_alone_asks_for_megatron_core() -> None:
    base = ["policy.model_name=m", "data.train.env_name=math", "env.math={}", "policy.backend=megatron"]
    policy = load_config(None, [*base, "cluster.gpus_per_node=2"], root=TRAINING_RUNS["grpo"]).config.policy
    assert policy.megatron_cfg.enabled and not policy.dtensor_cfg.enabled


@pytest.mark.parametrize(
    ("option", "key", "text"),
    [
        ("tensor_model_parallel_size=3", "tensor_model_parallel_size", "do not divide the 16 devices"),
        ("expert_model_parallel_size=32", "expert_model_parallel_size", "32 ranks do not divide the 16 devices"),
        ("expert_model_parallel_size=many", "expert_model_parallel_size", "found 'many'"),
        ("virtual_pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size", "no stages to interleave"),
        ("recompute_modules=[moe]", "recompute_modules", "only a selective recomputation"),
        ("optimizer.min_lr=1e-3", "optimizer.min_lr", "above lr"),
        ("scheduler.lr_warmup_init=1e-3", "scheduler.lr_warmup_init", "above optimizer.lr"),
        ("scheduler.lr_decay_style=WSD", "scheduler.lr_wsd_decay_iters", "found null"),
        ("scheduler.lr_decay_iters=5", "scheduler.lr_warmup_iters", "leaves nothing"),
        ("scheduler.end_weight_decay=0.1", "scheduler.weight_decay_incr_style", "found constant"),
        ("optimizer={lr: 3e-7, min_lr: 0, optimizer_cpu_offload: true}", "optimizer.optimizer_offload_fraction", "moves nothing"),
        ("peft={enabled: true, dropout: 0.1}", "peft.dropout", "sampled without dropout"),
        ("optimizer.fp16=true", "optimizer.fp16", "float16 is not in this version"),
        ("mtp_num_layers=2 policy.megatron_cfg.mtp_loss_scaling_factor=0.3", "mtp_num_layers", "multi-token prediction"),
        ("some_new_option=3", "some_new_option", "is not known"),
        ("optimizer.exp_avg_dtype=bf16", "optimizer.exp_avg_dtype", "is not known"),
    ],
)
def test_what_megatron_core_cannot_do_is_refused_at_its_key(recipe: Path, option: str, key: str, text: str) -> None:
    refused = refusals(
        recipe, *f"policy.megatron_cfg.{option}".split(" policy")[:1], *(f"policy{rest}" for rest in option.split(" policy")[1:])
    )
    assert list(refused) == [f"policy.megatron_cfg.{key}"] and text in refused[f"policy.megatron_cfg.{key}"]


def test_adapters_keep_nemo_rl_s_keys(recipe: Path) -> None:
    adapters = "{enabled: true, target_modules: [], exclude_modules: ['*out_proj*'], dim: 128, alpha: 512, dropout: 0.0, lora_dtype: None}"
    loaded = load(recipe, f"policy.megatron_cfg.peft={adapters}")
    section = loaded.config.policy.megatron_cfg.peft
    assert (section.enabled, section.dim, section.alpha, section.exclude_modules) == (True, 128, 512, ("*out_proj*",))
    assert loaded.config.policy.adapter_rank == 128


def test_the_torch_learner_trains_with_megatron_s_rate_warm_up_and_sizes(recipe: Path) -> None:
    loaded = load(recipe, TORCH)
    policy = loaded.config.policy
    assert policy.optimizer.name == "torch.optim.AdamW" and not policy.optimizer.decay_vectors
    assert policy.optimizer.kwargs == {"lr": 3e-7, "weight_decay": 0.01, "betas": [0.9, 0.95], "eps": 1e-7}
    assert policy.freeze_moe_router and policy.max_grad_norm == 0.5 and policy.scheduler_unit == "batch"
    (stage,) = policy.scheduler.stages
    assert stage.name == "constant" and stage.kwargs == {"warmup_steps": 13, "warmup_init_ratio": pytest.approx(0.1)}
    torch = policy.dtensor_cfg
    assert torch.enabled and torch.sequence_parallel and torch.activation_checkpointing
    assert (torch.tensor_parallel_size, torch.context_parallel_size, torch.expert_parallel_size) == (2, 2, 1)
    assert not torch.cpu_offload and not torch.lora_cfg.enabled, "the section that is switched off in the recipe says nothing"
    assert loaded.config.cluster.roles.learner.env_vars == {"NCCL_NVLS_ENABLE": "0"}
    assert not [difference for difference in loaded.differences if difference.effect is Effect.CHANGED]
    reasons = {difference.text for difference in loaded.differences if "megatron_cfg" in difference.key}
    assert len(reasons) > 8, "each group of keys has a reason of its own"


def test_a_recipe_without_an_optimizer_of_megatron_s_keeps_the_policy_s(recipe: Path) -> None:
    policy = load(
        recipe, TORCH, "~policy.megatron_cfg.optimizer", "policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 0.5}}"
    ).config.policy
    assert policy.optimizer.name == "torch.optim.SGD" and policy.scheduler is not None


CHANGES = [
    ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size", "instead of cut into stages"),
    ({"expert_model_parallel_size": 4, "moe_router_bias_update_rate": 0.001}, "moe_router_bias_update_rate", "bias stays"),
    ({"expert_model_parallel_size": 4, "moe_router_dtype": "fp64"}, "moe_router_dtype", "the model's own code"),
    ({"moe_router_load_balancing_type": "aux_loss"}, "moe_router_load_balancing_type", "no loss that balances"),
    ({"mtp_num_layers": 2, "mtp_detach_heads": "true", "mtp_loss_scaling_factor": 0.3}, "mtp_num_layers", "not trained"),
    (
        {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 2},
        "expert_model_parallel_size", "over 4 ranks instead of 2",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("options", "key", "text"), CHANGES, ids=[change[1] for change in CHANGES])
def test_what_the_torch_learner_does_otherwise_is_said_and_warned_of(
    recipe: Path, options: Mapping[str, Any], key: str, text: str
) -> None:
    loaded = load(recipe, TORCH, *(f"policy.megatron_cfg.{name}={value}" for name, value in options.items()))
    changed = {d.key: d.text for d in loaded.differences if d.effect is Effect.CHANGED}
    assert list(changed) == [f"policy.megatron_cfg.{key}"] and text in changed[f"policy.megatron_cfg.{key}"]
    assert any(key in str(warning) for warning in loaded.warnings)


@pytest.mark.parametrize(
    ("option", "key", "text"),
    [
        ("model_overrides={hidden_dropout: 0.1}", "model_overrides", "policy.hf_config_overrides"),
        ("optimizer.optimizer=muon", "optimizer.optimizer", "Set it to adam or sgd"),
        ("optimizer.fp16=true", "optimizer.fp16", "float16 is not in this version"),
        ("scheduler.end_weight_decay=0.1", "scheduler.end_weight_decay", "changes during training"),
        ("scheduler.lr_decay_style=triangle", "scheduler.lr_decay_style", "none of constant, linear"),
        ("peft={enabled: true, dim: 8, alpha: 32, lora_B_init_method: normal}", "peft.lora_B_init_method", "B starts at zero"),
        ("some_new_option=3", "some_new_option", "is not known"),
        ("optimizer.exp_avg_dtype=bf16", "optimizer.exp_avg_dtype", "is not known"),
        ("scheduler.lr_warmup_samples=3", "scheduler.lr_warmup_samples", "is not known"),
        ("freeze_config.freeze_language_model=true", "freeze_config.freeze_language_model", "nothing that models of text have"),
        ("tensor_model_parallel_size=two", "tensor_model_parallel_size", "a whole number of at least 1"),
        ("optimizer.lr=3e-7x", "optimizer.lr", "a number of at least 0"),
        ("scheduler=none", "scheduler", "a section"),
        ("env_vars=[A]", "env_vars", "a section, with the variables under it"),
    ],
)
def test_what_the_torch_learner_cannot_do_is_refused_at_its_key(recipe: Path, option: str, key: str, text: str) -> None:
    refused = refusals(recipe, TORCH, f"policy.megatron_cfg.{option}")
    assert list(refused) == [f"policy.megatron_cfg.{key}"] and text in refused[f"policy.megatron_cfg.{key}"]


@pytest.mark.parametrize(("asked", "chosen"), [("blockwise", "rowwise_with_gw_hp"), ("delayed", "tensorwise")])
def test_training_in_fp8_is_torchaos_where_the_torch_learner_trains(
    asked: str, chosen: str, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda name: True)
    options = ("fp8_cfg.enabled=true", f"fp8_cfg.fp8_recipe={asked}", "tensor_model_parallel_size=1")
    loaded = load(recipe, TORCH, *(f"policy.megatron_cfg.{option}" for option in options))
    assert (loaded.config.policy.fp8.enabled, loaded.config.policy.fp8.recipe_name) == (True, chosen)
    (changed,) = [d for d in loaded.differences if d.effect is Effect.CHANGED and "fp8" in d.key]
    assert f"Transformer Engine's is {asked}" in changed.text


def test_adapters_of_fused_layers_become_adapters_of_their_parts(recipe: Path) -> None:
    peft = (
        "{enabled: true, dim: 16, alpha: 64, dropout: 0.0, lora_A_init_method: uniform, target_modules: [linear_qkv, linear_fc2]}"
    )
    loaded = load(recipe, TORCH, f"policy.megatron_cfg.peft={peft}")
    lora = loaded.config.policy.dtensor_cfg.lora_cfg
    assert lora.enabled and (lora.dim, lora.alpha, lora.lora_A_init) == (16, 64, "uniform")
    assert lora.target_modules == ("q_proj", "k_proj", "v_proj", "down_proj")
    assert "policy.megatron_cfg.peft" in {d.key for d in loaded.differences if d.effect is Effect.CHANGED}
    everything = load(
        recipe, TORCH, "policy.megatron_cfg.peft={enabled: true, target_modules: [], exclude_modules: ['*.linear_proj']}"
    )
    assert everything.config.policy.dtensor_cfg.lora_cfg.exclude_modules == ("*.o_proj",)


# --- schedules -------------------------------------------------------------------------------------------------------------


def megatron_rate(options: Mapping[str, Any], rate: float, lowest: float, step: int) -> float:
    """The rate of Megatron Core's ``OptimizerParamScheduler`` after ``step`` calls of ``train``, from its definition."""
    warmup, end = options["lr_warmup_iters"], options["lr_decay_iters"]
    if warmup > 0 and step <= warmup:
        return float(options["lr_warmup_init"] + (rate - options["lr_warmup_init"]) * step / warmup)
    style = options["lr_decay_style"]
    if style == "constant":
        return rate
    if step > end:
        return lowest
    if style == "inverse-square-root":
        return max(lowest, rate * math.sqrt(max(warmup, 1) / max(step, 1)))
    progress = (step - warmup) / (end - warmup)
    if style == "WSD":
        progress, style = max(0.0, 1 - (end - step) / options["lr_wsd_decay_iters"]), options["lr_wsd_decay_style"]
    shape = {
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "exponential": 2 * 0.5**progress - 1,
        "minus_sqrt": 1 - math.sqrt(progress),
    }[style]
    return lowest + (rate - lowest) * shape


STYLES = [
    *({"lr_decay_style": style} for style in ("constant", "linear", "cosine", "inverse-square-root")),
    *(
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 9, "lr_wsd_decay_style": style}
        for style in ("linear", "cosine", "exponential", "minus_sqrt")
    ),
]


@pytest.mark.parametrize("warmup", [0, 1, 13])
@pytest.mark.parametrize("style", STYLES, ids=lambda style: "-".join(map(str, style.values())))
def test_the_rate_is_megatron_s_at_every_step(style: Mapping[str, Any], warmup: int) -> None:
    options = {**style, "lr_warmup_iters": warmup, "lr_warmup_init": 2e-8, "lr_decay_iters": 30}
    section = make_schedule_section(options, 3e-7, 3e-8)
    schedule = make_schedule(section["name"], section["kwargs"], total_steps=100) if section else None
    last = 30 if style["lr_decay_style"] == "inverse-square-root" else 50  # ours has no end: a warning says so
    found = [3e-7 * (schedule.ratio(step) if schedule else 1.0) for step in range(last + 1)]
    assert found == pytest.approx([megatron_rate(options, 3e-7, 3e-8, step) for step in range(last + 1)], rel=1e-12)


def test_a_schedule_without_a_length_ends_with_the_run() -> None:
    section = make_schedule_section({"lr_decay_style": "linear", "lr_decay_iters": None, "lr_warmup_iters": 0}, 1.0, 0.0)
    assert section == {"name": "linear", "kwargs": {"min_ratio": 0.0}}
