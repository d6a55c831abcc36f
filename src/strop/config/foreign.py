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

from strop.config.keys import find
from strop.config.model import Model

LATER = "It is not in this version"


@dataclass(frozen=True)
class Foreign:
    """``pattern`` is matched against the dotted key, shortest key first."""

    pattern: str
    note: str
    tuning: bool = False
    nothing: Any = None  # a further value that switches the key off


FOREIGN = (
    Foreign(
        "grpo.adv_estimator.*",
        "grpo.adv_estimator.name chooses it; its options are grpo.normalize_rewards, grpo.use_leave_one_out_baseline, grpo.minus_baseline "
        "and algorithm.kwargs.advantage",
        tuning=True,
    ),
    Foreign("grpo.val_batch_size", "validation goes through the same engine, which batches by itself", tuning=True),
    Foreign("grpo.batch_multiplier", "with dynamic sampling, groups are sampled until the batch is full", tuning=True),
    Foreign("grpo.seq_logprob_error_threshold", LATER),
    Foreign("grpo.invalid_tool_call_advantage", f"{LATER}; give the reward in the environment"),
    Foreign("grpo.malformed_thinking_advantage", f"{LATER}; give the reward in the environment"),
    Foreign("*.async_*.max_generation_failures", "use max_errors_in_a_row of the same section"),
    Foreign("reward_penalties", f"{LATER}; give the penalty in the environment"),
    Foreign("checkpointing.model_save_format", "weights are saved as safetensors", tuning=True),
    Foreign("checkpointing.save_consolidated", "every checkpoint can be exported to a Hugging Face folder"),
    Foreign("*.offload_optimizer_for_logprob", LATER),
    Foreign("*.make_sequence_length_divisible_by", "rows are packed without padding", tuning=True),
    Foreign("*.tokenizer.use_fastokens", LATER),
    Foreign("*.dtensor_cfg._v2", "there is one torch learner", tuning=True),
    Foreign("*.dtensor_cfg.automodel_kwargs", LATER),
    Foreign("*.dtensor_cfg.env_vars", "use cluster.roles.learner.env_vars"),
    Foreign("*.megatron_cfg.*", "the Megatron Core learner is not in this version", tuning=True),
    Foreign("policy.draft", LATER),
    Foreign("*.sequence_packing.algorithm", "groups are packed as a whole", tuning=True),
    Foreign("*.sequence_packing.microbatch_order", "the gradient does not depend on it", tuning=True),
    Foreign("*.sequence_length_round", "rows are packed without padding", tuning=True),
    Foreign("*generation.port_range_*", "free ports are chosen automatically", tuning=True),
    Foreign("*generation.refit_transport", "use policy.generation.weight_sync.transport"),
    Foreign("*generation.refit_*", "policy.generation.weight_sync configures how weights are sent", tuning=True),
    Foreign("*generation.real_quant_export_cpu_offload", LATER, tuning=True),
    Foreign("*generation.mcore_generation_config", "the Megatron generation backend is not in this version", tuning=True),
    Foreign("*generation.vllm_cfg.use_tqdm", "the console shows the progress of a step", tuning=True),
    Foreign("*generation.vllm_cfg.*vllm_metrics_logger*", "the engine's statistics are logged at every step", tuning=True),
    Foreign("*generation.vllm_cfg.load_format", "weights are published by the learner", tuning=True),
    Foreign("*generation.vllm_cfg.skip_tokenizer_init", "stop strings need the tokenizer", tuning=True),
    Foreign("*generation.vllm_cfg.distributed_executor_backend", "use policy.generation.vllm_kwargs"),
    Foreign("*generation.vllm_cfg.*_refit_*", "policy.generation.weight_sync configures how weights are sent", tuning=True),
    Foreign("*generation.vllm_cfg.reset_encoder_cache_after_weight_update", f"{LATER}; models read only text"),
    Foreign("*generation.vllm_cfg.use_deep_gemm", f"{LATER}; rollouts use the trained weights, not FP8"),
    Foreign("*generation.vllm_cfg.num_*_layers_in_bf16", f"{LATER}; rollouts use the trained weights, not FP8"),
    Foreign("data.num_workers", "tasks are read in the driver process", tuning=True),
    Foreign("data.use_multiple_dataloader", "list the entries under data.train, with their weights"),
    Foreign("data*.processor", "input_key, output_key, prompt_file and the environment turn a row into a task", tuning=True),
    Foreign("logger.mlflow_enabled", LATER),
    Foreign("logger.mlflow", LATER, tuning=True),
    Foreign("logger.swanlab_enabled", LATER),
    Foreign("logger.swanlab", LATER, tuning=True),
    Foreign("logger.monitor_gpus", LATER, tuning=True),
    Foreign("logger.gpu_monitoring", LATER, tuning=True),
    Foreign("logger.wandb.log_nemo_gym_full_result_tables", "every rollout is stored, see logger.rollouts", tuning=True),
    Foreign("cluster.master_port_range_*", "free ports are chosen automatically", tuning=True),
    Foreign("data_plane", LATER),
    Foreign("on_policy_distillation", "use strop distillation for a run with a teacher"),
    *(
        Foreign(section, f"use strop {section} for a run with this section")
        for section in ("grpo", "sft", "dpo", "rm", "ppo", "distillation")
    ),
    Foreign("teacher", "use strop distillation for a run with a teacher"),
    Foreign("value", "use strop ppo for a run with a critic"),
    Foreign("ppo.val_batch_size", "validation goes through the same engine, which batches by itself", tuning=True),
    Foreign("distillation.val_batch_size", "validation goes through the same engine, which batches by itself", tuning=True),
    Foreign("*.batch_multiplier", "with dynamic sampling, groups are sampled until the batch is full", tuning=True),
    Foreign("ppo.skip_reference_policy_logprobs_calculation", "they are computed only where a KL term needs them", tuning=True),
    Foreign("ppo.seq_logprob_error_threshold", LATER),
    Foreign("ppo.async_ppo.warmup_generation_lead_steps", LATER),
    Foreign("ppo.async_ppo.drop_incomplete_targets_on_restore", LATER),
    Foreign("data*.add_bos", "the chat template determines it", tuning=True),
    Foreign("data*.add_generation_prompt", "the chat template determines it", tuning=True),
    Foreign("policy.activation_checkpointing_enabled", "use policy.dtensor_cfg.activation_checkpointing"),
    Foreign("*.dtensor_cfg.clear_cache_every_n_steps", LATER, tuning=True),
    Foreign("value.reward_model_cfg", "the critic is a sequence classifier with one label", tuning=True),
    *(
        Foreign(f"teacher.{key}", "the teacher only scores", tuning=True)
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


def foreign_keys(
    values: Mapping[str, Any], root: type[Model], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Foreign, bool]]:
    """Yield (path, entry, whether it can be dropped) for every unsupported key of NeMo-RL, outermost first."""
    for name, value in values.items():
        path = (*prefix, str(name))
        entry = match(path, root)
        if entry is not None:
            yield path, entry, entry.tuning or asks_nothing(value) or value == entry.nothing
        elif isinstance(value, Mapping):
            yield from foreign_keys(value, root, path)


def match(path: tuple[str, ...], root: type[Model]) -> Foreign | None:
    if find(root, path) is not None or path[0] == "env":
        return None
    return next((entry for entry in FOREIGN if fnmatchcase(".".join(path), entry.pattern)), None)


def asks_nothing(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("enabled") is False or all(asks_nothing(inner) for inner in value.values())
    return value is None or value is False or value in (0, "", "none", "None") or value == []
