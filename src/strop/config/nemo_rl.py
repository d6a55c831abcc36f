"""Keys of NeMo-RL recipes that Strop does not have, and what to do about each.

A key that is switched off (null, false, 0, empty, or in a section with ``enabled: false``) is dropped with a warning, and so is a key
that only tunes something that works differently here (``safe_to_ignore``). Any other such key asks for something that Strop would not do,
and is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from strop.base_config import BaseConfig
from strop.config.load.keys import find_field

NOT_SUPPORTED = "It is not in this version"


@dataclass(frozen=True)
class UnusedNemoRlKey:
    """``pattern`` is matched against the dotted key, shortest key first."""

    pattern: str
    advice: str
    safe_to_ignore: bool = False
    off_value: Any = None  # a further value that switches the key off


UNUSED_NEMO_RL_KEYS = (
    UnusedNemoRlKey(
        "grpo.adv_estimator.*",
        "grpo.adv_estimator.name chooses it; its options are grpo.normalize_rewards, grpo.use_leave_one_out_baseline, grpo.minus_baseline "
        "and algorithm.kwargs.advantage",
        safe_to_ignore=True,
    ),
    UnusedNemoRlKey(
        "grpo.val_batch_size", "validation goes through the same engine, which batches by itself", safe_to_ignore=True
    ),
    UnusedNemoRlKey(
        "grpo.batch_multiplier", "with dynamic sampling, groups are sampled until the batch is full", safe_to_ignore=True
    ),
    UnusedNemoRlKey("grpo.seq_logprob_error_threshold", NOT_SUPPORTED),
    UnusedNemoRlKey("grpo.invalid_tool_call_advantage", f"{NOT_SUPPORTED}; give the reward in the environment"),
    UnusedNemoRlKey("grpo.malformed_thinking_advantage", f"{NOT_SUPPORTED}; give the reward in the environment"),
    UnusedNemoRlKey("*.async_*.max_generation_failures", "use max_errors_in_a_row of the same section"),
    UnusedNemoRlKey("reward_penalties", f"{NOT_SUPPORTED}; give the penalty in the environment"),
    UnusedNemoRlKey("checkpointing.model_save_format", "weights are saved as safetensors", safe_to_ignore=True),
    UnusedNemoRlKey("checkpointing.save_consolidated", "every checkpoint can be exported to a Hugging Face folder"),
    UnusedNemoRlKey("*.offload_optimizer_for_logprob", NOT_SUPPORTED),
    UnusedNemoRlKey("*.make_sequence_length_divisible_by", "rows are packed without padding", safe_to_ignore=True),
    UnusedNemoRlKey("*.tokenizer.use_fastokens", NOT_SUPPORTED),
    UnusedNemoRlKey("*.dtensor_cfg._v2", "there is one torch learner", safe_to_ignore=True),
    UnusedNemoRlKey("*.dtensor_cfg.automodel_kwargs", NOT_SUPPORTED),
    UnusedNemoRlKey("*.dtensor_cfg.env_vars", "use cluster.roles.learner.env_vars"),
    UnusedNemoRlKey("*.megatron_cfg.*", "the Megatron Core learner is not in this version", safe_to_ignore=True),
    UnusedNemoRlKey("policy.draft", NOT_SUPPORTED),
    UnusedNemoRlKey("*.sequence_packing.algorithm", "groups are packed as a whole", safe_to_ignore=True),
    UnusedNemoRlKey("*.sequence_packing.microbatch_order", "the gradient does not depend on it", safe_to_ignore=True),
    UnusedNemoRlKey("*.sequence_length_round", "rows are packed without padding", safe_to_ignore=True),
    UnusedNemoRlKey("*generation.port_range_*", "free ports are chosen automatically", safe_to_ignore=True),
    UnusedNemoRlKey("*generation.refit_transport", "use policy.generation.weight_sync.transport"),
    UnusedNemoRlKey("*generation.refit_*", "policy.generation.weight_sync configures how weights are sent", safe_to_ignore=True),
    UnusedNemoRlKey("*generation.real_quant_export_cpu_offload", NOT_SUPPORTED, safe_to_ignore=True),
    UnusedNemoRlKey(
        "*generation.mcore_generation_config", "the Megatron generation backend is not in this version", safe_to_ignore=True
    ),
    UnusedNemoRlKey("*generation.vllm_cfg.use_tqdm", "the console shows the progress of a step", safe_to_ignore=True),
    UnusedNemoRlKey(
        "*generation.vllm_cfg.*vllm_metrics_logger*", "the engine's statistics are logged at every step", safe_to_ignore=True
    ),
    UnusedNemoRlKey("*generation.vllm_cfg.load_format", "weights are published by the learner", safe_to_ignore=True),
    UnusedNemoRlKey("*generation.vllm_cfg.skip_tokenizer_init", "stop strings need the tokenizer", safe_to_ignore=True),
    UnusedNemoRlKey("*generation.vllm_cfg.distributed_executor_backend", "use policy.generation.vllm_kwargs"),
    UnusedNemoRlKey(
        "*generation.vllm_cfg.*_refit_*", "policy.generation.weight_sync configures how weights are sent", safe_to_ignore=True
    ),
    UnusedNemoRlKey("*generation.vllm_cfg.reset_encoder_cache_after_weight_update", f"{NOT_SUPPORTED}; models read only text"),
    UnusedNemoRlKey("*generation.vllm_cfg.use_deep_gemm", f"{NOT_SUPPORTED}; rollouts use the trained weights, not FP8"),
    UnusedNemoRlKey("*generation.vllm_cfg.num_*_layers_in_bf16", f"{NOT_SUPPORTED}; rollouts use the trained weights, not FP8"),
    UnusedNemoRlKey("data.num_workers", "tasks are read in the driver process", safe_to_ignore=True),
    UnusedNemoRlKey("data.use_multiple_dataloader", "list the entries under data.train, with their weights"),
    UnusedNemoRlKey(
        "data*.processor", "input_key, output_key, prompt_file and the environment turn a row into a task", safe_to_ignore=True
    ),
    UnusedNemoRlKey("logger.mlflow_enabled", NOT_SUPPORTED),
    UnusedNemoRlKey("logger.mlflow", NOT_SUPPORTED, safe_to_ignore=True),
    UnusedNemoRlKey("logger.swanlab_enabled", NOT_SUPPORTED),
    UnusedNemoRlKey("logger.swanlab", NOT_SUPPORTED, safe_to_ignore=True),
    UnusedNemoRlKey("logger.monitor_gpus", NOT_SUPPORTED, safe_to_ignore=True),
    UnusedNemoRlKey("logger.gpu_monitoring", NOT_SUPPORTED, safe_to_ignore=True),
    UnusedNemoRlKey(
        "logger.wandb.log_nemo_gym_full_result_tables", "every rollout is stored, see logger.rollouts", safe_to_ignore=True
    ),
    UnusedNemoRlKey("cluster.master_port_range_*", "free ports are chosen automatically", safe_to_ignore=True),
    UnusedNemoRlKey("data_plane", NOT_SUPPORTED),
    UnusedNemoRlKey("on_policy_distillation", "use strop distillation for a run with a teacher"),
    *(
        UnusedNemoRlKey(section, f"use strop {section} for a run with this section")
        for section in ("grpo", "sft", "dpo", "rm", "ppo", "distillation")
    ),
    UnusedNemoRlKey("teacher", "use strop distillation for a run with a teacher"),
    UnusedNemoRlKey("value", "use strop ppo for a run with a critic"),
    UnusedNemoRlKey(
        "ppo.val_batch_size", "validation goes through the same engine, which batches by itself", safe_to_ignore=True
    ),
    UnusedNemoRlKey(
        "distillation.val_batch_size", "validation goes through the same engine, which batches by itself", safe_to_ignore=True
    ),
    UnusedNemoRlKey(
        "*.batch_multiplier", "with dynamic sampling, groups are sampled until the batch is full", safe_to_ignore=True
    ),
    UnusedNemoRlKey(
        "ppo.skip_reference_policy_logprobs_calculation", "they are computed only where a KL term needs them", safe_to_ignore=True
    ),
    UnusedNemoRlKey("ppo.seq_logprob_error_threshold", NOT_SUPPORTED),
    UnusedNemoRlKey("ppo.async_ppo.warmup_generation_lead_steps", NOT_SUPPORTED),
    UnusedNemoRlKey("ppo.async_ppo.drop_incomplete_targets_on_restore", NOT_SUPPORTED),
    UnusedNemoRlKey("data*.add_bos", "the chat template determines it", safe_to_ignore=True),
    UnusedNemoRlKey("data*.add_generation_prompt", "the chat template determines it", safe_to_ignore=True),
    UnusedNemoRlKey("policy.activation_checkpointing_enabled", "use policy.dtensor_cfg.activation_checkpointing"),
    UnusedNemoRlKey("*.dtensor_cfg.clear_cache_every_n_steps", NOT_SUPPORTED, safe_to_ignore=True),
    UnusedNemoRlKey("value.reward_model_cfg", "the critic is a sequence classifier with one label", safe_to_ignore=True),
    *(
        UnusedNemoRlKey(f"teacher.{key}", "the teacher only scores", safe_to_ignore=True)
        for key in (
            "train_*",
            "generation*",
            "optimizer*",
            "scheduler",
            "max_grad_norm",
            "logprob_*",
            "dtensor_cfg*",
            "megatron_cfg*",
            "dynamic_batching*",
            "sequence_packing*",
            "make_sequence_length_divisible_by",
            "offload_optimizer_for_logprob",
            "hf_config_overrides",
            "max_total_sequence_length",
        )
    ),
)


def find_unused_keys(
    values: Mapping[str, Any], root: type[BaseConfig], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], UnusedNemoRlKey, bool]]:
    """Yield (path, entry, whether it can be dropped) for every unsupported key of NeMo-RL, outermost first."""
    for name, value in values.items():
        path = (*prefix, str(name))
        entry = match_unused_key(path, root)
        if entry is not None:
            yield path, entry, entry.safe_to_ignore or is_switched_off(value) or value == entry.off_value
        elif isinstance(value, Mapping):
            yield from find_unused_keys(value, root, path)


def match_unused_key(path: tuple[str, ...], root: type[BaseConfig]) -> UnusedNemoRlKey | None:
    if find_field(root, path) is not None or path[0] == "env":
        return None
    return next((entry for entry in UNUSED_NEMO_RL_KEYS if fnmatchcase(".".join(path), entry.pattern)), None)


def is_switched_off(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("enabled") is False or all(is_switched_off(inner) for inner in value.values())
    return value is None or value is False or value in (0, "", "none", "None") or value == []
