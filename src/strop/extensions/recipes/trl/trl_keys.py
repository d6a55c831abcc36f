"""What becomes of each argument of TRL's trainers and commands."""

from __future__ import annotations

from collections.abc import Mapping

from strop import packages
from strop.extensions.recipes.library_recipe import (
    RUN_NAMES,
    SERVICE_KEYS,
    Carried,
    KeyTable,
    Lacking,
    Left,
    LibraryRecipe,
    Together,
    enable_services,
    name_in_services,
    to,
)
from strop.extensions.recipes.trl import trl_losses as losses
from strop.extensions.recipes.trl import trl_model as model
from strop.extensions.recipes.trl.trl_optimizer import (
    KWARGS,
    translate_batches,
    translate_lengths,
    translate_optimizer,
    translate_precision,
    translate_saving,
    translate_schedule,
    translate_validation,
)
from strop.extensions.trackers.trackers_config import SERVICES

OPTIONS_OF_SERVICES: Mapping[str, Mapping[str, str]] = {
    "trackio": {"project": "logger.trackio.project", "trackio_space_id": "logger.trackio.space_id"},
    "wandb": {
        "wandb_project": "logger.wandb.project", "wandb_entity": "logger.wandb.entity", "wandb_run_group": "logger.wandb.group",
    },  # of scripts around TRL, such as those of Open-R1
}  # fmt: skip


REPORT_ARGUMENTS = ("report_to", "run_name", *(key for options in OPTIONS_OF_SERVICES.values() for key in options))
REPORT_KEYS = (*SERVICE_KEYS, *(to for options in OPTIONS_OF_SERVICES.values() for to in options.values()))


def translate_reports(recipe: LibraryRecipe) -> None:
    """`all` are the services whose packages are installed. Only Trackio reads `project`; the others' projects are in the environment."""
    asked = recipe.value("report_to")
    names = [asked] if isinstance(asked, str) else list(asked or [])
    if "all" in names:
        names = [name for name in SERVICES if packages.is_here(name)]
    services = enable_services(recipe, "report_to", names, silent=("none",), same={})
    if recipe.value("run_name") and not name_in_services(recipe, "run_name", RUN_NAMES, services):
        recipe.unused("run_name", "it names runs in services")
    _translate_options_of_services(recipe, services)


def _translate_options_of_services(recipe: LibraryRecipe, services: tuple[str, ...]) -> None:
    for service, options in OPTIONS_OF_SERVICES.items():
        for key, target in options.items():
            if service not in services:
                recipe.unused(key, f"it is about {service}, which report_to does not name")
            elif recipe.value(key) is not None and not recipe.is_default(key):
                recipe.carry(key, target, recipe.value(key))


LOGGING = Left("every step is logged: metrics.jsonl in the run's log folder")
DATA_LOADER = Left("there are no data loaders with their own workers")
SHARDING = Left(
    "the learner shards over all GPUs by itself: policy.dtensor_cfg and cluster say how", ("policy.dtensor_cfg.cpu_offload",)
)
HUB = Left("a run uploads nothing; `strop export` writes a folder to upload")
KERNELS = Left("it chooses kernels, not what is computed")
PADDING = Left("rows are packed without padding, and examples never see each other", ("policy.sequence_packing.enabled",))
REFERENCE_SYNC = Lacking(
    "the reference is the policy as it was when the run began", "Remove the key; policy.ema is an average to save."
)
QUANTIZED = Lacking(
    "weights are not quantized in this version", "Train with LoRA on bfloat16 weights: set dtype: bfloat16. Remove the key."
)
UNUSED_HERE = Left("it is not about what is trained")

OPTIMIZER = Together(translate_optimizer, ("policy.optimizer.name", f"{KWARGS}.lr", f"{KWARGS}.weight_decay", f"{KWARGS}.betas"))
SCHEDULE = Together(translate_schedule, ("policy.scheduler", "policy.scheduler_unit"))
PRECISION = Together(translate_precision, ("policy.precision", "policy.weights_dtype"))
BATCHES = Together(
    translate_batches,
    ("policy.train_global_batch_size", "policy.train_micro_batch_size", "grpo.num_generations_per_prompt", "grpo.num_prompts_per_step",
     "grpo.update_epochs", "cluster.gpus_per_node"),
)  # fmt: skip
LENGTHS = Together(translate_lengths, ("grpo.max_num_steps", "grpo.max_num_epochs"))
VALIDATION = Together(translate_validation, ("grpo.val_period", "grpo.val_at_start", "grpo.val_num_generations_per_prompt"))
SAVING = Together(
    translate_saving,
    ("checkpointing.save_period", "checkpointing.keep_top_k", "checkpointing.metric_name", "checkpointing.higher_is_better",
     "checkpointing.save_optimizer"),
)  # fmt: skip
REPORTS = Together(translate_reports, REPORT_KEYS)
MODEL = Together(model.translate_model, ("policy.model_name", "policy.trust_remote_code", "policy.device"))

TRAINING_ARGUMENTS: KeyTable = {
    "output_dir": Carried(("checkpointing.checkpoint_dir", "logger.log_dir"), lambda value: value or "trainer_output"),
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), BATCHES),
    **dict.fromkeys(("max_steps", "num_train_epochs"), LENGTHS),
    **dict.fromkeys(("optim", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"), OPTIMIZER),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"), SCHEDULE),
    **dict.fromkeys(("optim_args", "optim_target_modules"), Lacking("there is no counterpart",
        "Set policy.optimizer.kwargs. Remove the key.")),
    **dict.fromkeys(("bf16", "fp16"), PRECISION),
    "max_grad_norm": Carried(("policy.max_grad_norm",), lambda value: value or None),
    "gradient_checkpointing": to("policy.dtensor_cfg.activation_checkpointing"),
    "seed": to("{section}.seed"),
    "data_seed": Left("the order of the data follows from the run's seed"),
    "average_tokens_across_devices": Left("a mean over tokens is always one over all devices"),
    "label_smoothing_factor": Lacking("the loss has no label smoothing"),
    "neftune_noise_alpha": Lacking("embeddings get no noise"),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), Left("validation computes as training does")),
    **dict.fromkeys(
        ("tf32", "torch_compile", "torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "liger_kernel_config",
         "gradient_checkpointing_kwargs", "use_cache", "torch_empty_cache_steps"), KERNELS),
    "auto_find_batch_size": Left("micro-batches are cut by tokens, whatever the batch", ("policy.train_micro_batch_size",)),
    **dict.fromkeys(
        ("logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter",
         "include_num_input_tokens_seen", "log_level", "log_level_replica", "disable_tqdm"), LOGGING),
    **dict.fromkeys(REPORT_ARGUMENTS, REPORTS),
    "trackio_bucket_id": Left("Trackio chooses the bucket of its Space"),
    "trackio_static_space_id": Left("no Space is made of a run that has ended: `trackio freeze` makes one"),
    **dict.fromkeys(("eval_strategy", "eval_steps", "eval_on_start"), VALIDATION),
    "eval_delay": Left("validation begins with the first period", ("grpo.val_start_at",)),
    **dict.fromkeys(
        ("per_device_eval_batch_size", "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object",
         "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics"),
        Left("validation is cut into batches by itself, and its metrics are means over all examples")),
    **dict.fromkeys(
        ("save_strategy", "save_steps", "save_total_limit", "save_only_model", "load_best_model_at_end", "metric_for_best_model",
         "greater_is_better"), SAVING),
    **dict.fromkeys(("save_on_each_node", "enable_jit_checkpoint", "restore_callback_states_from_checkpoint"),
                    Left("a run that is stopped saves by itself")),
    "ignore_data_skip": Left("a run that continues knows its place in the data"),
    **dict.fromkeys(
        ("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"), HUB),
    "full_determinism": Left("a run repeats itself bit for bit on the same machine"),
    "resume_from_checkpoint": Left("the same command in the same folders continues a run of Strop's", ("checkpointing.resume",)),
    **dict.fromkeys(("accelerator_config", "fsdp", "fsdp_config", "deepspeed"), SHARDING),
    "parallelism_config": Lacking(
        "parallel sizes are keys here", "Set policy.dtensor_cfg.tensor_parallel_size and context_parallel_size. Remove the key."),
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend", "ddp_timeout",
         "local_rank"), SHARDING),
    **dict.fromkeys(
        ("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
         "dataloader_multiprocessing_context", "dataloader_in_order"), DATA_LOADER),
    "dataloader_drop_last": Left("what does not fill the last batch of a pass begins the next one"),
    **dict.fromkeys(("remove_unused_columns", "label_names", "length_column_name"), Left("columns are read by name")),
    "train_sampling_strategy": Carried(("data.shuffle",), lambda value: value != "sequential"),
    **dict.fromkeys(("debug", "skip_memory_metrics", "do_train", "do_eval", "do_predict"), UNUSED_HERE),
    **dict.fromkeys(("model_init_kwargs", "trust_remote_code", "model_name_or_path", "model_revision", "use_cpu"), MODEL),
    "dtype": PRECISION,
    "attn_implementation": KERNELS,
    **dict.fromkeys(
        ("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora"),
        Together(model.translate_adapters, tuple(f"{model.LORA}.{name}" for name in (
            "enabled", "dim", "alpha", "dropout", "target_modules", "use_rslora")))),
    "lora_task_type": Left("the kind of run says it"),
    **dict.fromkeys(("lora_target_parameters", "lora_modules_to_save", "use_dora"),
                    Lacking("adapters are LoRA's, on linear layers", "Set lora_target_modules. Remove the key.")),
    **dict.fromkeys(("load_in_8bit", "load_in_4bit"), QUANTIZED),
    **dict.fromkeys(("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"), Left("weights are not quantized")),
    **dict.fromkeys(
        ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "datasets", "test_split_size"),
        Together(model.translate_data, ("data.train.dataset_name", "data.train.subset", "data.train.split", "data.validation.split"))),
    **dict.fromkeys(("dataset_streaming", "streaming", "dataset_num_proc"), Left("data is read as it is needed")),
    "ignore_bias_buffers": Left("it works around a limit of DDP"),
    "disable_dropout": Left("models train without dropout"),
    "router_aux_loss_coef": Lacking("a loss of load balancing is not in this version",
    "Remove the key; policy.freeze_moe_router keeps the router."),
    "pad_to_multiple_of": PADDING,
}  # fmt: skip

REWARDS = Together(model.translate_rewards, ("env", "data.default.env_name"))
ENGINE = Together(
    model.translate_engine,
    ("policy.generation.backend", "policy.generation.top_k", "policy.generation.min_p", "policy.generation.colocated.enabled",
     f"{model.VLLM}.gpu_memory_utilization", f"{model.VLLM}.tensor_parallel_size"),
)  # fmt: skip
SEQUENCE = Together(
    model.translate_sequence_length,
    ("policy.generation.max_new_tokens", "policy.max_total_sequence_length", "data.max_input_seq_length"),
)
SERVER = Left("engines are started by the run")
SHOWN = Left("all rollouts are stored: `strop rollouts` shows them", ("logger.rollouts", "logger.num_val_samples_to_print"))

SAMPLING: KeyTable = {
    **dict.fromkeys(("reward_funcs", "reward_model_name_or_path", "reward_model_path", "reward_weights"), REWARDS),
    **dict.fromkeys(
        ("use_vllm", "top_k", "min_p", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size"), ENGINE),
    **dict.fromkeys(("max_completion_length", "max_new_tokens", "max_prompt_length", "vllm_max_model_length"), SEQUENCE),
    "temperature": to("policy.generation.temperature"),
    "top_p": to("policy.generation.top_p"),
    "repetition_penalty": Lacking("the learner would compute log-probabilities of another distribution than the engine sampled"),
    "generation_kwargs": Lacking("there is no counterpart", "Set what is meant in policy.generation. Remove the key."),
    "vllm_structured_outputs_regex": Lacking("completions are not constrained in this version"),
    "chat_template_kwargs": to("policy.tokenizer.chat_template_kwargs"),
    **dict.fromkeys(
        ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"), SERVER),
    "vllm_enable_sleep_mode": Left("engines that share GPUs sleep while the learner trains", (f"{model.VLLM}.sleep_level",)),
    **dict.fromkeys(
        ("vllm_model_impl", "cache_implementation", "use_transformers_continuous_batching",
         "transformers_continuous_batching_config", "use_transformers_paged", "cast_lm_head_to_fp32"), KERNELS),
    "ds3_gather_for_generation": SHARDING,
    "shuffle_dataset": to("data.shuffle"),
    "train_sampling_strategy": Left("shuffle_dataset says it"),
    **dict.fromkeys(
        ("log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo"), SHOWN),
    "missing_eos_penalty": Lacking(
        "truncated rollouts are not charged so", "Set grpo.reward_shaping.stop_properly_penalty_coef. Remove the key."),
}  # fmt: skip

GROUPS: KeyTable = {
    **dict.fromkeys(("num_generations", "generation_batch_size", "steps_per_generation", "num_iterations"), BATCHES),
    "num_generations_eval": VALIDATION,
    "mask_truncated_completions": to("grpo.overlong_filtering"),
    "sync_ref_model": REFERENCE_SYNC,
    **dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps"), Left("sync_ref_model reads it")),
}

GRPO: KeyTable = {
    **dict.fromkeys(
        ("loss_type", "beta", "use_bias_correction_kl", "importance_sampling_level", "off_policy_mask_threshold", *losses.OBJECTIVE_KEYS,
         *(f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_max", "clip_min", "cap"))),
        Together(losses.translate_policy_loss, (
            "algorithm.name", "algorithm.objective", "loss_fn.aggregation", "loss_fn.constant_length", "algorithm.corrections",
            "loss_fn.reference_policy_kl_penalty"))),
    **dict.fromkeys(
        ("scale_rewards", "multi_objective_aggregation"), Together(losses.translate_advantage, ("algorithm.advantage",))),
    **dict.fromkeys(
        ("entropy_coef", "top_entropy_quantile", "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta",
         "entropy_target"), Together(losses.translate_entropy, ("loss_fn.entropy_bonus", "algorithm.selection"))),
    "max_tool_calling_iterations": Lacking(
        "tools are arguments of the trainer", "Set grpo.max_rollout_turns and an environment with tools.", ("grpo.max_rollout_turns",)),
}  # fmt: skip

RLOO: KeyTable = {
    **dict.fromkeys(
        ("beta", "epsilon", "epsilon_high", "reward_clip_range"),
        Together(losses.translate_rloo, ("algorithm.name", "loss_fn.reference_policy_kl_penalty", "grpo.reward_scaling"))),
    "normalize_advantages": Lacking(
        "a leave-one-out baseline that is whitened afterwards is not in this version",
        "Set algorithm.name=reinforce_pp_baseline. Remove it."),
}  # fmt: skip

RECORDED: KeyTable = {
    "max_length": Together(model.translate_recorded_length, ("policy.max_total_sequence_length",)),
    "truncation_mode": Left("longer examples are dropped and counted"),
    **dict.fromkeys(("padding_free", "packing", "packing_strategy", "eval_packing", "pad_token"), PADDING),
    "activation_offloading": Left("it saves memory only", ("policy.dtensor_cfg.activation_checkpointing",)),
    **dict.fromkeys(("precompute_ref_log_probs",), to("dpo.precompute_reference")),
    "precompute_ref_batch_size": Left("it is cut by tokens", ("policy.logprob_batch_size",)),
    "chat_template_path": to("policy.tokenizer.chat_template"),
    "eos_token": Left("the loss tokens end with a stop token", ("data.add_eos",)),
    "sync_ref_model": REFERENCE_SYNC,
    **dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps"), Left("sync_ref_model reads it")),
}

SFT: KeyTable = {
    **dict.fromkeys(
        ("loss_type", "assistant_only_loss", "completion_only_loss"),
        Together(losses.translate_sft_loss, ("algorithm.dft", "sft.only_unmask_final"))),
    "shuffle_dataset": Left("the data is shuffled for each pass", ("data.shuffle",)),
    "dataset_text_field": Lacking(
        "examples are conversations, or prompt and completion", "Give the data such columns. Remove the key."),
    "dataset_kwargs": Lacking("there is no counterpart"),
}  # fmt: skip

DPO: KeyTable = dict.fromkeys(
    ("loss_type", "loss_weights", "ld_alpha", "f_divergence_type", "f_alpha_divergence_coef", "label_smoothing", "beta", "use_weighting",
     "discopop_tau"),
    Together(losses.translate_preference_loss, (
        "algorithm.name", "dpo.reference_policy_kl_penalty", "dpo.preference_loss_weight", "dpo.sft_loss_weight")),
)  # fmt: skip

KTO: KeyTable = dict.fromkeys(
    ("loss_type", "beta", "desirable_weight", "undesirable_weight"),
    Together(losses.translate_kto, ("algorithm.name", "dpo.reference_policy_kl_penalty")),
)

REWARD: KeyTable = {"center_rewards_coefficient": Carried(("rm.centering",), lambda value: value or 0.0)}

ONLINE_DPO: KeyTable = dict.fromkeys(
    ("beta", "loss_type", "max_length"), Together(losses.translate_online_dpo, ("algorithm.name",))
)

TRL_KEYS: dict[str, KeyTable] = {  # by the name of the command
    "grpo": {**TRAINING_ARGUMENTS, **SAMPLING, **GROUPS, **GRPO},
    "rloo": {**TRAINING_ARGUMENTS, **SAMPLING, **GROUPS, **RLOO},
    "online_dpo": {**TRAINING_ARGUMENTS, **SAMPLING, **ONLINE_DPO},
    "sft": {**TRAINING_ARGUMENTS, **RECORDED, **SFT},
    "dpo": {**TRAINING_ARGUMENTS, **RECORDED, **DPO},
    "kto": {**TRAINING_ARGUMENTS, **RECORDED, **KTO},
    "reward": {**TRAINING_ARGUMENTS, **RECORDED, **REWARD},
}
