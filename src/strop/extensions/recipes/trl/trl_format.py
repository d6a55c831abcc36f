"""Files of TRL: the YAML that its commands take, and a dump of a trainer's arguments as YAML or JSON. Their keys are flat."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from strop.config.source.yaml_source import read_config_file
from strop.extensions.recipes.library_recipe import LibraryRecipe, ReadRecipe, RecipeFormat, apply_table, find_entry
from strop.extensions.recipes.trl.trl_keys import TRL_KEYS
from strop.extensions.recipes.trl.trl_optimizer import ROLLOUTS
from strop.problems import ConfigError, Problem

# Of every trainer.
COMMON: Mapping[str, Any] = {
    "output_dir": None, "per_device_train_batch_size": 8, "num_train_epochs": 3.0, "max_steps": -1, "lr_scheduler_type":
    "linear", "lr_scheduler_kwargs": None, "warmup_steps": 0, "optim": "adamw_torch_fused", "optim_args": None,
    "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-08, "optim_target_modules": None,
    "gradient_accumulation_steps": 1, "average_tokens_across_devices": True, "max_grad_norm": 1.0, "label_smoothing_factor":
    0.0, "bf16": None, "fp16": False, "bf16_full_eval": False, "fp16_full_eval": False, "tf32": None,
    "gradient_checkpointing": True, "gradient_checkpointing_kwargs": None, "torch_compile": False, "torch_compile_backend":
    None, "torch_compile_mode": None, "use_liger_kernel": False, "liger_kernel_config": None, "use_cache": False,
    "neftune_noise_alpha": None, "torch_empty_cache_steps": None, "auto_find_batch_size": False, "logging_strategy":
    "steps", "logging_steps": 10, "logging_first_step": False, "log_on_each_node": True, "logging_nan_inf_filter": True,
    "include_num_input_tokens_seen": "no", "log_level": "passive", "log_level_replica": "warning", "disable_tqdm": None,
    "report_to": "none", "run_name": None, "project": "huggingface", "trackio_space_id": None, "trackio_bucket_id": None,
    "trackio_static_space_id": None, "eval_strategy": "no", "eval_steps": None, "eval_delay": 0,
    "per_device_eval_batch_size": 8, "prediction_loss_only": False, "eval_on_start": False, "eval_do_concat_batches": True,
    "eval_use_gather_object": False, "eval_accumulation_steps": None, "include_for_metrics": [], "batch_eval_metrics":
    False, "save_only_model": False, "save_strategy": "steps", "save_steps": 500, "save_on_each_node": False,
    "save_total_limit": None, "enable_jit_checkpoint": False, "push_to_hub": False, "hub_token": None, "hub_private_repo":
    None, "hub_model_id": None, "hub_strategy": "every_save", "hub_always_push": False, "hub_revision": None,
    "load_best_model_at_end": False, "metric_for_best_model": None, "greater_is_better": None, "ignore_data_skip": False,
    "restore_callback_states_from_checkpoint": False, "full_determinism": False, "seed": 42, "data_seed": None, "use_cpu":
    False, "accelerator_config": None, "parallelism_config": None, "dataloader_drop_last": False, "dataloader_num_workers":
    0, "dataloader_pin_memory": True, "dataloader_persistent_workers": False, "dataloader_prefetch_factor": None,
    "dataloader_multiprocessing_context": None, "dataloader_in_order": True, "label_names": None, "length_column_name":
    "length", "ddp_find_unused_parameters": None, "ddp_bucket_cap_mb": None, "ddp_broadcast_buffers": None,
    "ddp_static_graph": None, "ddp_backend": None, "ddp_timeout": 1800, "fsdp": None, "fsdp_config": None, "deepspeed":
    None, "debug": "", "skip_memory_metrics": True, "do_train": False, "do_eval": False, "do_predict": False,
    "resume_from_checkpoint": None, "local_rank": -1, "model_init_kwargs": None, "trust_remote_code": False,
}  # fmt: skip

# Only of one trainer, or with its own default, by the name of its command.
TRAINERS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {
        "learning_rate": 1e-06, "remove_unused_columns": False, "train_sampling_strategy": "random", "router_aux_loss_coef":
        None, "disable_dropout": False, "cast_lm_head_to_fp32": False, "num_generations": 8, "num_generations_eval": None,
        "max_completion_length": 512, "ds3_gather_for_generation": True, "shuffle_dataset": True, "pad_to_multiple_of": "auto",
        "generation_batch_size": None, "steps_per_generation": None, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p":
        None, "generation_kwargs": None, "chat_template_kwargs": None, "repetition_penalty": 1.0, "cache_implementation": None,
        "use_vllm": False, "vllm_mode": "colocate", "vllm_model_impl": "vllm", "vllm_enable_sleep_mode": False,
        "vllm_structured_outputs_regex": None, "vllm_server_base_url": None, "vllm_server_host": "0.0.0.0", "vllm_server_port":
        8000, "vllm_server_timeout": 240.0, "vllm_group_port": 51216, "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": None, "vllm_tensor_parallel_size": 1, "beta": 0.0, "num_iterations": 1, "epsilon": 0.2,
        "delta": None, "epsilon_high": None, "sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "importance_sampling_level": "token",
        "reward_weights": None, "multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group", "loss_type":
        "dapo", "mask_truncated_completions": False, "sync_ref_model": False, "ref_model_mixup_alpha": 0.6,
        "ref_model_sync_steps": 512, "top_entropy_quantile": 1.0, "entropy_coef": 0.0, "use_adaptive_entropy": False,
        "entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005, "entropy_target": 0.2,
        "max_tool_calling_iterations": None, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode":
        "sequence_mask", "vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_clip_min": None,
        "off_policy_mask_threshold": None, "use_bias_correction_kl": True, "log_completions": False, "log_multimodal": True,
        "num_completions_to_print": None, "log_unique_prompts": False, "log_completions_hub_repo": None,
        "use_transformers_continuous_batching": False, "transformers_continuous_batching_config": None,
        "use_transformers_paged": False, "vllm_importance_sampling_cap": None,
    },
    "rloo": {
        "learning_rate": 1e-06, "remove_unused_columns": False, "train_sampling_strategy": "random", "router_aux_loss_coef":
        None, "disable_dropout": False, "num_generations": 2, "num_generations_eval": None, "max_completion_length": 512,
        "ds3_gather_for_generation": True, "shuffle_dataset": True, "pad_to_multiple_of": "auto", "generation_batch_size": None,
        "steps_per_generation": None, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "generation_kwargs": None,
        "chat_template_kwargs": None, "repetition_penalty": 1.0, "cache_implementation": None, "use_vllm": False, "vllm_mode":
        "colocate", "vllm_model_impl": "vllm", "vllm_enable_sleep_mode": False, "vllm_structured_outputs_regex": None,
        "vllm_server_base_url": None, "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000, "vllm_server_timeout": 240.0,
        "vllm_group_port": 51216, "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": None,
        "vllm_tensor_parallel_size": 1, "beta": 0.05, "num_iterations": 1, "epsilon": 0.2, "epsilon_high": None,
        "reward_weights": None, "normalize_advantages": False, "reward_clip_range": None, "mask_truncated_completions": False,
        "sync_ref_model": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "log_completions": False,
        "log_multimodal": True, "num_completions_to_print": None, "log_unique_prompts": False,
        "use_transformers_continuous_batching": False, "transformers_continuous_batching_config": None,
        "use_transformers_paged": False,
    },
    "online_dpo": {
        "learning_rate": 5e-07, "remove_unused_columns": False, "train_sampling_strategy": "random", "reward_model_path": None,
        "max_new_tokens": 64, "max_length": 512, "temperature": 0.9, "top_p": 1.0, "top_k": 0, "min_p": None,
        "repetition_penalty": 1.0, "generation_kwargs": None, "cache_implementation": None, "missing_eos_penalty": None, "beta":
        [0.1], "loss_type": "sigmoid", "disable_dropout": True, "use_vllm": False, "vllm_model_impl": "vllm",
        "vllm_structured_outputs_regex": None, "vllm_gpu_memory_utilization": 0.55, "vllm_mode": "colocate",
        "vllm_server_base_url": None, "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000, "vllm_server_timeout": 240.0,
        "vllm_group_port": 51216, "vllm_tensor_parallel_size": 1, "vllm_enable_sleep_mode": False, "ds3_gather_for_generation":
        True, "reward_weights": None,
    },
    "sft": {
        "learning_rate": 2e-05, "remove_unused_columns": True, "train_sampling_strategy": "random", "router_aux_loss_coef":
        None, "chat_template_path": None, "dataset_text_field": "text", "dataset_kwargs": None, "dataset_num_proc": None,
        "eos_token": None, "max_length": 1024, "truncation_mode": "keep_start", "shuffle_dataset": False, "packing": False,
        "packing_strategy": "bfd", "padding_free": False, "pad_to_multiple_of": "auto", "eval_packing": None,
        "completion_only_loss": None, "assistant_only_loss": False, "loss_type": "nll", "activation_offloading": False,
        "pad_token": None,
    },
    "dpo": {
        "learning_rate": 1e-06, "remove_unused_columns": True, "train_sampling_strategy": "random", "router_aux_loss_coef":
        None, "disable_dropout": True, "dataset_num_proc": None, "max_length": 1024, "truncation_mode": "keep_start",
        "padding_free": False, "pad_to_multiple_of": "auto", "precompute_ref_log_probs": False, "precompute_ref_batch_size":
        None, "loss_type": ["sigmoid"], "loss_weights": None, "ld_alpha": None, "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5, "label_smoothing": 0.0, "beta": 0.1, "use_weighting": False, "discopop_tau": 0.05,
        "activation_offloading": False, "sync_ref_model": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512,
        "pad_token": None,
    },
    "kto": {
        "learning_rate": 1e-06, "remove_unused_columns": True, "train_sampling_strategy": "sequential", "router_aux_loss_coef":
        None, "disable_dropout": True, "dataset_num_proc": None, "max_length": 1024, "pad_to_multiple_of": "auto",
        "precompute_ref_log_probs": False, "precompute_ref_batch_size": None, "loss_type": "kto", "beta": 0.1,
        "desirable_weight": 1.0, "undesirable_weight": 1.0, "activation_offloading": False, "sync_ref_model": False,
        "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512,
    },
    "reward": {
        "learning_rate": 0.0001, "remove_unused_columns": True, "train_sampling_strategy": "random", "chat_template_path": None,
        "disable_dropout": True, "dataset_num_proc": None, "eos_token": None, "max_length": 1024, "pad_to_multiple_of": "auto",
        "center_rewards_coefficient": None, "activation_offloading": False, "pad_token": None,
    },
}  # fmt: skip

# Of the commands: the model, its adapters, the data and the rewards.
SCRIPT: Mapping[str, Any] = {
    "model_name_or_path": None, "model_revision": "main", "dtype": "float32", "attn_implementation": None, "use_peft":
    False, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": None, "lora_target_parameters":
    None, "lora_modules_to_save": None, "lora_task_type": "CAUSAL_LM", "use_rslora": False, "use_dora": False,
    "load_in_8bit": False, "load_in_4bit": False, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": False,
    "bnb_4bit_quant_storage": None, "dataset_name": None, "dataset_config": None, "dataset_train_split": "train",
    "dataset_test_split": "test", "dataset_streaming": False, "ignore_bias_buffers": False, "reward_model_name_or_path":
    None, "reward_funcs": None, "datasets": [], "streaming": False, "test_split_size": None,
}  # fmt: skip


KINDS = {"grpo": "grpo", "rloo": "grpo", "online_dpo": "grpo", "sft": "sft", "dpo": "dpo", "kto": "dpo", "reward": "rm"}
TELLING = ("output_dir", "model_name_or_path", "per_device_train_batch_size", "learning_rate", "num_train_epochs", "max_steps")
SCRIPT_OF_SAMPLING = ("reward_model_name_or_path", "reward_funcs")
OF_THE_COMMAND = ("env", "config", "output_router_logits")  # read by TrlParser, not by a trainer


def is_trl(values: Mapping[str, Any]) -> bool:
    """Return whether a file is flat and has keys of TRL."""
    return sum(key in values for key in TELLING) >= 2 and any(key in COMMON or key in SCRIPT for key in values)


def find_command(values: Mapping[str, Any], path: Path) -> str:
    """Return the command of TRL whose arguments these are. Its file's name may tell. Raises ConfigError if several could be."""
    fitting = [name for name in TRL_KEYS if all(find_entry(TRL_KEYS[name], key) is not None for key in values)]
    fitting = [name for name in fitting if name in ROLLOUTS or not any(key in values for key in SCRIPT_OF_SAMPLING)]
    own = {name: sum(key in TRAINERS[name] for key in values) for name in fitting or TRL_KEYS}
    likely = [name for name, count in own.items() if count == max(own.values())]
    distinct = [name for name in likely if any(key in TRAINERS[name] and all(
        key not in TRAINERS[other] for other in likely if other != name) for key in values)]  # fmt: skip
    likely = distinct or likely
    likely = [name for name in likely if name in path.stem.lower().replace("-", "_").split("_")] or likely
    if len(likely) != 1:
        fix = "Say which: " + " or ".join(f"--from trl-{name}" for name in likely) + "."
        raise ConfigError([Problem("", f"{path} does not say which of TRL's trainers it is for", fix)])
    return likely[0]


def read_trl(path: Path, gpus: int | None = None, command: str | None = None) -> ReadRecipe:
    """Translate a file for a number of GPUs, or the number that a dump was made for. Raises ConfigError."""
    if path.suffix in (".bin", ".pt", ".pkl"):
        fix = "Write it as JSON: json.dump(args.to_dict(), file), with args = torch.load(path, weights_only=False)."
        raise ConfigError([Problem("", f"{path} is a pickle, which may run code when it is read", fix)])
    source = read_config_file(path)
    values = {key: value for key, value in source.values.items() if key not in OF_THE_COMMAND}
    command = command or find_command(values, path)
    defaults = _list_defaults(command)
    world = gpus or _infer_gpus({**defaults, **values})
    recipe = LibraryRecipe(
        KINDS[command],
        values,
        {".".join(key): origin for key, origin in source.origins.items()},
        {**defaults, "gpus": world or 1, "gpus_known": world is not None},
        "TRL",
    )
    apply_table(recipe, TRL_KEYS[command])
    return recipe.finish(values, source.files)


def explain_key(kind: str, name: str, value: Any) -> str:
    """Return what an argument of TRL's trainer for this kind of run is here; empty if it has none of this name."""
    command = next((command for command, own in KINDS.items() if own == kind), "")
    if command not in TRL_KEYS or (entry := find_entry(TRL_KEYS[command], name)) is None:
        return ""
    recipe = LibraryRecipe(kind, {name: value}, {}, {**_list_defaults(command), "gpus": 1, "gpus_known": True}, "TRL")
    try:
        apply_table(recipe, TRL_KEYS[command])
    except Exception:  # a value of another type than TRL's
        return "It is an argument of TRL's; `strop translate` says what becomes of it in a file."
    said = [f"{each.text}. {each.fix}".strip() for each in recipe.differences if each.key == name]
    if said and "=" in said[0] and type(value) in (int, float) and str(value) not in said[0]:
        said.append("That is with TRL's defaults for the rest.")
    words = set(name.split("_"))
    near = [key for key in map(recipe.name_key, entry.to) if len(words & set(re.split(r"[._]", key))) > 1]
    if near and not any("=" in text for text in said):
        said.append(f"Look at {' and '.join(near)}.")
    return f"TRL's {name}: {' '.join(said) or 'it has its default there, for which nothing is set here.'}"


def _list_defaults(command: str) -> dict[str, Any]:
    sampled = {} if command in ROLLOUTS else dict.fromkeys(SCRIPT_OF_SAMPLING)
    return {**COMMON, **{key: value for key, value in SCRIPT.items() if key not in sampled}, **TRAINERS[command]}


def _infer_gpus(values: Mapping[str, Any]) -> int | None:
    """A dump has both the completions of a batch and how often each process trains on a part: it knows its number of processes."""
    batch, steps = values.get("generation_batch_size"), values.get("steps_per_generation")
    own = (steps or 0) * values["per_device_train_batch_size"]
    return batch // own if batch and own and batch % own == 0 else None


def _make_format(name: str, command: str | None, matches: Callable[[Mapping[str, Any]], bool]) -> RecipeFormat:
    read = partial(read_trl, command=command)
    return RecipeFormat(name, matches, read, (".yaml", ".yml", ".json", ".bin"), lambda path, gpus: read(path, gpus))


FORMATS = (
    _make_format("trl", None, is_trl),
    *(_make_format(f"trl-{name}", name, lambda values: False) for name in TRL_KEYS),
)
