"""NeMo-RL's recipes of every kind: what asks for nothing is left out with one warning, what asks for something says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.config import ConfigError, LoadedConfig, TrainingRunConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.extensions.recipes.rules import Effect

SAMPLING = ("grpo", "ppo", "distillation")

# Of every recipe: its own keys with the values it has, as far as Strop has no such key or gives it another meaning.
EVERYWHERE = """
policy.offload_optimizer_for_logprob=false
policy.make_sequence_length_divisible_by=${policy.dtensor_cfg.tensor_parallel_size}
policy.dynamic_batching.enabled=false
policy.sequence_packing.algorithm=modified_first_fit_decreasing
policy.sequence_packing.microbatch_order=packer
policy.sequence_packing.sequence_length_round=64
policy.megatron_cfg.enabled=false
policy.megatron_cfg.force_reconvert_from_hf=false
policy.megatron_cfg.empty_unused_memory_level=1
policy.megatron_cfg.optimizer={optimizer: adam, lr: 5.0e-6, clip_grad: "${policy.max_grad_norm}"}
policy.megatron_cfg.scheduler={lr_decay_style: constant, lr_warmup_iters: 13}
logger.mlflow_enabled=false
logger.mlflow={experiment_name: dev, tracking_uri: "http://localhost:5000"}
logger.swanlab_enabled=false
logger.swanlab={project: dev, name: dev}
logger.monitor_gpus=true
logger.gpu_monitoring={collection_interval: 10, flush_interval: 10}
cluster.segment_size=null
"""
GENERATION = """
policy.generation_batch_size=32
policy.generation.port_range_low=3000
policy.generation.port_range_high=4999
policy.generation.mcore_generation_config={buffer_size_gb: 10, num_cuda_graphs: 4, max_tokens: 16384}
policy.generation.vllm_cfg.logprobs_mode=processed_logprobs
policy.generation.vllm_cfg.use_deep_gemm=false
policy.generation.vllm_cfg.use_tqdm=true
policy.generation.vllm_cfg.num_last_layers_in_bf16=0
policy.generation.vllm_cfg.num_first_layers_in_bf16=0
policy.generation.vllm_cfg.enable_vllm_metrics_logger=true
policy.generation.vllm_cfg.vllm_metrics_logger_interval=0.5
policy.generation.vllm_cfg.http_refit_api_key_env_var=null
policy.generation.vllm_cfg.zmq_refit_server_port=null
policy.generation.vllm_cfg.reset_encoder_cache_after_weight_update=false
policy.generation.vllm_cfg.distributed_executor_backend=null
policy.generation.refit_transport=null
policy.generation.refit_cfg={nixl: {device: cuda, backend_name: UCX}}
policy.generation.real_quant_export_cpu_offload=true
policy.generation.colocated.resources={gpus_per_node: null, num_nodes: null}
cluster.master_port_range_low=1400
cluster.master_port_range_high=1999
"""
RECORDED = """
data.num_workers=1
policy.dtensor_cfg._v2=true
policy.dtensor_cfg.env_vars={}
policy.dtensor_cfg.automodel_kwargs={}
policy.dtensor_cfg.lora_cfg={enabled: false, target_modules: [], exclude_modules: [], match_all_linear: true, dim: 8, alpha: 32,
 dropout: 0.0, dropout_position: post, lora_A_init: xavier, use_triton: true}
policy.optimizer.kwargs={lr: 5.0e-6, weight_decay: 0.1, betas: [0.9, 0.98], eps: 1.0e-5, foreach: false, fused: false}
"""
OWN = {
    "sft": """
        sft={max_num_epochs: 1, max_num_steps: 60, val_period: 10, val_batches: 8, val_global_batch_size: 32, val_micro_batch_size: 1,
         val_at_start: true, val_at_end: false, seed: 42, only_unmask_final: false}
        checkpointing.metric_name=val:val_loss
        policy.dtensor_cfg.dp_replicate_size=1
        data={add_bos: true, add_eos: true, add_generation_prompt: false, shuffle: true}
        data.default={prompt_file: null, system_prompt_file: null, processor: sft_processor}
        """,
    "dpo": """
        dpo={max_num_epochs: 1, max_num_steps: 150, val_period: 25, val_batches: 8, val_global_batch_size: 8, val_micro_batch_size: 1,
         reference_policy_kl_penalty: 0.05, preference_average_log_probs: false, preference_loss_weight: 1, sft_loss_weight: 0,
         sft_average_log_probs: "${.preference_average_log_probs}"}
        checkpointing.metric_name=val:validation-default_loss
        policy.dtensor_cfg.clear_cache_every_n_steps=null
        policy.dtensor_cfg.env_vars={PYTORCH_CUDA_ALLOC_CONF: ""}
        policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 20}},
         {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}, {milestones: [20]}]
        """,
    "rm": """
        rm={max_num_epochs: 1, max_num_steps: -1, val_period: 16, val_batches: -1, val_global_batch_size: 32, val_micro_batch_size: 1}
        checkpointing={metric_name: val:validation-default_loss, save_period: "${rm.val_period}"}
        policy.activation_checkpointing_enabled=false
        policy.reward_model_cfg={enabled: true, reward_model_type: bradley_terry}
        """,
    "ppo": """
        ppo={val_batch_size: 256, batch_multiplier: 1, skip_reference_policy_logprobs_calculation: true, seq_logprob_error_threshold: null}
        ppo.async_ppo={enabled: false, warmup_generation_lead_steps: null, in_flight_weight_updates: false,
         recompute_kv_cache_after_weight_updates: false, drop_incomplete_targets_on_restore: false}
        ppo.adv_estimator={name: gae, gae_lambda: 0.95, gae_gamma: 1, normalize_advantages: true, gae_lambda_value: null,
         gae_lambda_policy: null, length_adaptive_alpha: 0.0}
        ppo.reward_shaping={enabled: true, overlong_buffer_length: 48, overlong_buffer_penalty: 1, max_response_length: 448}
        value_loss_fn={scale: 0.4, cliprange: 0.2}
        checkpointing={model_save_format: safetensors, save_consolidated: false}
        policy.scheduler=[{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}, {milestones: []}]
        value={model_name: "${policy.model_name}", train_global_batch_size: "${policy.train_global_batch_size}",
         make_sequence_length_divisible_by: "${value.dtensor_cfg.tensor_parallel_size}"}
        value.reward_model_cfg={enabled: true, reward_model_type: regression}
        value.dtensor_cfg={_v2: true, custom_parallel_plan: null}
        value.dynamic_batching={enabled: false, sequence_length_round: 64}
        value.sequence_packing={algorithm: modified_first_fit_decreasing, microbatch_order: packer}
        value.megatron_cfg={enabled: false, force_reconvert_from_hf: false, optimizer: {lr: 1.0e-5}}
        """,
    "distillation": """
        distillation={max_num_steps: 1000, max_num_epochs: 10, val_batch_size: 64, topk_logits_k: 64}
        loss_fn={kl_type: mixed, mixed_kl_weight: 0.5, zero_outside_topk: false}
        teacher={model_name: Qwen/Qwen3-4B, train_global_batch_size: 64, max_total_sequence_length: 8192, logprob_chunk_size: null,
         max_grad_norm: 1.0, offload_optimizer_for_logprob: false}
        teacher.tokenizer={name: "${..model_name}", chat_template_kwargs: null}
        teacher.scheduler=[{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10}}, {milestones: []}]
        teacher.dtensor_cfg={enabled: true, tensor_parallel_size: 4, context_parallel_size: 2}
        cluster={gpus_per_node: 8, num_nodes: 1}
        teacher.dynamic_batching={enabled: true, train_mb_tokens: "${mul:${..max_total_sequence_length}, ${..train_micro_batch_size}}"}
        teacher.optimizer={name: torch.optim.AdamW, kwargs: {lr: 2.0e-5}}
        teacher.generation={backend: vllm, vllm_cfg: {tensor_parallel_size: 1}}
        data.validation.repeat=16
        """,
}
BASE = {
    **dict.fromkeys(SAMPLING, "data.train.env_name=math\nenv.math={num_workers: 8}"),
    **dict.fromkeys(("sft", "dpo", "rm"), "data.train.dataset_name=squad\ndata.validation.dataset_name=squad"),
}


def settings(section: str) -> list[str]:
    """The recipe as overrides, one to a key."""
    text = "\n".join(
        ["policy.model_name=m", BASE[section], EVERYWHERE, GENERATION if section in SAMPLING else RECORDED, OWN[section]]
    )
    lines: list[str] = []
    for line in text.splitlines():
        if "=" in line.split("{")[0].split("[")[0]:
            lines.append(line.strip())
        elif line.strip():
            lines[-1] += " " + line.strip()  # a value goes on
    return lines


def load(section: str, *more: str) -> LoadedConfig[Any]:
    return load_config(None, [*settings(section), *more], root=TRAINING_RUNS[section])


@pytest.mark.parametrize("section", OWN)
def test_a_recipe_loads_and_one_warning_names_what_was_left_out(section: str) -> None:
    loaded = load(section)
    assert isinstance(loaded.config, TrainingRunConfig)
    first, *others = map(str, loaded.warnings)
    assert first.startswith("ignored keys of NeMo-RL that have no effect here: ")
    assert " more\n" in first and "`strop translate` says why" in first
    left_out = {"policy.megatron_cfg.optimizer", "policy.sequence_packing.algorithm"}
    assert left_out <= {difference.key for difference in loaded.differences if difference.effect is Effect.UNUSED}
    assert not any("NeMo-RL" in warning for warning in others)


def test_what_both_have_is_taken_over() -> None:
    assert load("sft").config.sft.val_batches == 8 and load("sft").config.checkpointing.metric_name == "val:val_loss"
    dpo = load("dpo").config
    assert dpo.dpo.sft_average_log_probs is False and [stage.name[-8:] for stage in dpo.policy.scheduler.stages] == [
        "LinearLR",
        "nstantLR",
    ]
    rm = load("rm").config
    assert rm.rm.last_step > 10**9 and rm.checkpointing.save_period == 16
    ppo = load("ppo").config
    assert ppo.value.model_name == "m" and ppo.value_loss_fn.scale == 0.4 and ppo.ppo.reward_shaping.max_response_length == 448
    distillation = load("distillation").config
    assert distillation.teacher.tokenizer.name == "Qwen/Qwen3-4B" and distillation.data.validation[0].repeat == 16
    assert (
        distillation.teacher.dtensor_cfg.tensor_parallel_size == 4 and distillation.teacher.dtensor_cfg.context_parallel_size == 2
    )


@pytest.mark.parametrize(
    ("section", "key", "said"),
    [
        ("ppo", "value.dtensor_cfg.tensor_parallel_size=2", "a multiple of 2 devices must train"),
        ("ppo", "value.dtensor_cfg.context_parallel_size=2", "a multiple of 2 devices must train"),
        ("ppo", "value.dtensor_cfg.cpu_offload=true", "Set it to false"),
        ("ppo", "value.dtensor_cfg.enabled=false", "Set value.dtensor_cfg.enabled=true"),
        ("ppo", "value.megatron_cfg.enabled=true", "Set policy.backend=torch"),
        ("ppo", "value.train_global_batch_size=8", "the critic takes its optimizer steps with the policy"),
        ("ppo", "policy.generation.backend=megatron", "Set policy.generation.backend to vllm, or to torch"),
        ("sft", "policy.generation.backend=megatron", "the Megatron generation backend is not in this version"),
        ("ppo", "policy.generation.vllm_cfg.distributed_executor_backend=ray", "Use policy.generation.vllm_kwargs"),
        ("distillation", "on_policy_distillation.enabled=true", "Use strop distillation"),
        ("dpo", "sft.max_num_steps=3", "Use strop sft for a run with this section"),
        ("sft", "teacher.model_name=m", "Use strop distillation for a run with a teacher"),
        ("dpo", "value.model_name=m", "Use strop ppo for a run with a critic"),
    ],
)
def test_a_key_that_asks_for_something_else_says_what_to_do(section: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(section, key)
    assert said in str(caught.value)
    assert len(caught.value.problems) == 1


def test_an_environment_that_no_data_names_is_left_out_as_nemo_rl_leaves_it() -> None:
    loaded = load("ppo", "env.math.num_workers=8", "env.dapo.num_workers=8")
    assert any(each.key == "env.dapo" and each.effect is Effect.UNUSED for each in loaded.differences)
    named = load("ppo", "env.math.num_workers=8", "env.dapo.num_workers=8", "data.train.env_name=dapo")
    assert not any(each.key == "env.dapo" for each in named.differences)


def test_the_names_of_families_of_multi_token_prediction_are_mtp() -> None:
    key = "policy.generation.vllm_kwargs.speculative_config"
    loaded = load("ppo", "policy.generation.backend=vllm", f"{key}.method=deepseek_mtp", f"{key}.num_speculative_tokens=1")
    speculation = loaded.config.policy.generation.vllm_cfg.speculation
    assert (speculation.method, speculation.model_name) == ("mtp", loaded.config.policy.model_name)


def test_vllms_speculative_config_is_the_section_of_speculation(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        """
policy:
  model_name: m
  draft: {enabled: true, model_name: head, loss_weight: 0.5, num_layers: null, aux_layer_indices: null}
  generation:
    backend: vllm
    vllm_kwargs:
      speculative_config:
        {method: eagle3, model: "${policy.draft.model_name}", num_speculative_tokens: 3, draft_tensor_parallel_size: 1}
grpo: {val_period: 0}
checkpointing: {metric_name: null}
data: {train: {dataset_name: gsm8k, env_name: math}}
env: {math: {num_workers: 8}}
"""
    )
    loaded = load_config(path, [], root=TRAINING_RUNS["grpo"])
    policy = loaded.config.policy
    speculation = policy.generation.vllm_cfg.speculation
    assert (speculation.method, speculation.num_speculative_tokens, speculation.model_name) == ("eagle3", 3, None)
    assert policy.draft.enabled and policy.draft.model_name == "head" and policy.draft.loss_weight == 0.5
    assert not policy.generation.vllm_kwargs
    changed = {difference.key for difference in loaded.differences if difference.effect is not Effect.UNUSED}
    assert "policy.generation.vllm_kwargs.speculative_config" in changed
    with pytest.raises(ConfigError, match=r"which policy\.generation\.vllm_cfg\.speculation does not have"):
        load_config(path, ["policy.generation.vllm_kwargs.speculative_config.tree=1"], root=TRAINING_RUNS["grpo"])
    mtp = ["policy.draft.enabled=false", "policy.generation.vllm_kwargs.speculative_config={method: mtp, model: null}"]
    found = load_config(path, mtp, root=TRAINING_RUNS["grpo"]).config.policy.generation.vllm_cfg.speculation
    assert (found.method, found.model_name) == ("mtp", "m")
