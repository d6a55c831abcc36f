"""What becomes of each key of verl's PPO and SFT trainers."""

from __future__ import annotations

from collections.abc import Callable

from strop.extensions.recipes.library_recipe import (
    SERVICE_KEYS,
    Carried,
    Entry,
    KeyTable,
    Lacking,
    Left,
    LibraryRecipe,
    Together,
    to,
)
from strop.extensions.recipes.verl import verl_losses as losses
from strop.extensions.recipes.verl import verl_losses as model
from strop.extensions.recipes.verl import verl_training as training
from strop.extensions.recipes.verl.verl_training import ACTOR, MODEL, REF, ROLLOUT

MADE_OF = Left("it names a class of verl's")
PROFILER = Left("profiles are taken by other means", ())
KERNELS = Left("it chooses kernels, not what is computed")
PACKED = Left("rows are packed without padding", ("policy.sequence_packing.enabled",))
OFFLOADING = Left("policy.offload decides what leaves the GPU while the engine samples", ("policy.offload",))
SHARDING = Left("it is about how weights are sharded and moved, not what is computed")
MICRO_BATCHES = Left("log-probabilities are cut by the same budget as training", ("policy.logprob_batch_size",))
LOADER = Left("there are no data loaders with their own workers")
MEMORY = Left("it saves memory or time, and changes no result")
ENGINE_OPTION = Left("it is the engine's own choice", ("policy.generation.vllm_kwargs",))
RAY = Left("it is about processes and waiting, not training")
EXTERNAL = Lacking(
    "modules are imported by the names of environments and classes", "Name module:Class where it is used. Remove the key."
)
MTP = Lacking("a loss of multi-token prediction is not in this version")
MEGATRON_DETAIL = Left("it is about how Megatron Core computes")


def _carry_template(recipe: LibraryRecipe) -> None:
    prefix = "data.apply_chat_template_kwargs."
    for key in (key for key in recipe.values if key.startswith(prefix)):
        recipe.carry(key, f"policy.tokenizer.chat_template_kwargs.{key.removeprefix(prefix)}", recipe.value(key))


def _together(translate: Callable[[LibraryRecipe], None], keys: tuple[str, ...], *ours: str) -> dict[str, Entry]:
    return dict.fromkeys(keys, Together(translate, ours))


def _inside(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)


OPTIM = ("lr", "weight_decay", "betas", "optimizer", "optimizer_impl", "override_optimizer_config.*", "lr_warmup_steps",
    "lr_warmup_steps_ratio",
         "lr_scheduler_type", "warmup_style", "lr_scheduler", "lr_decay_style", "min_lr_ratio", "num_cycles")  # fmt: skip
OPTIM_LEFT: dict[str, Entry] = {
    "total_training_steps": Left("the length of the run says it"), "override_optimizer_config": Left("it is empty"),
    **dict.fromkeys(("lr_warmup_init", "min_lr", "lr_decay_steps", "weight_decay_incr_style", "lr_wsd_decay_style", "lr_wsd_decay_steps"),
                    Lacking("schedules of Megatron Core are said otherwise here", "Set policy.scheduler. Remove the key.")),
    "use_checkpoint_opt_param_scheduler": MEGATRON_DETAIL,
}  # fmt: skip


def _optimizer(section: str, translate: Callable[[LibraryRecipe], None], to_section: str) -> dict[str, Entry]:
    made = _together(
        translate,
        _inside(section, *OPTIM),
        f"{to_section}.optimizer.name",
        f"{to_section}.optimizer.kwargs.lr",
        f"{to_section}.scheduler",
    )
    return made | {f"{section}.{name}": entry for name, entry in OPTIM_LEFT.items()}


RUN = _together(
    training.translate_run,
    (
        *_inside("trainer", "total_epochs", "total_training_steps", "test_freq", "val_before_train", "save_freq", "max_actor_ckpt_to_keep",
                 "max_ckpt_to_keep", "default_local_dir", "resume_mode", "resume_from_path", "logger", "project_name", "experiment_name",
                 "critic_warmup", "val_only"),
        "data.val_max_samples",
    ),
    "grpo.max_num_steps", "grpo.max_num_epochs", "grpo.val_period", "grpo.val_at_start", "grpo.max_val_samples",
    "checkpointing.save_period", "checkpointing.keep_top_k", "checkpointing.checkpoint_dir", "checkpointing.resume",
    *SERVICE_KEYS, "ppo.policy_training_start_step",
)  # fmt: skip
MACHINES = _together(
    training.translate_machines, _inside("trainer", "n_gpus_per_node", "nnodes"), "cluster.gpus_per_node", "cluster.num_nodes"
)
TRAINER_LEFT: dict[str, Entry] = {
    "trainer.max_critic_ckpt_to_keep": Left("a checkpoint has policy and critic", ("checkpointing.keep_top_k",)),
    "trainer.log_val_generations": to("logger.num_val_samples_to_print"),
    **dict.fromkeys(_inside("trainer", "rollout_data_dir", "validation_data_dir"), Left("all rollouts are stored: `strop rollouts`")),
    "trainer.wandb_proxy": Left("export HTTPS_PROXY: Weights & Biases reads it"),
    "trainer.balance_batch": Left("work is balanced over ranks by itself"),
    **dict.fromkeys(_inside("trainer", "esi_redundant_time", "default_hdfs_dir", "del_local_ckpt_after_load",
                            "ray_wait_register_center_timeout", "use_legacy_worker_impl", "profile_interval", "_target_",
                            "runtime_env", "task_runner"), RAY),
    "trainer.device": Left("a GPU is taken where there is one", ("policy.device",)),
    "trainer.checkpoint.*": Left("checkpoints hold all that a run needs to continue", ("checkpointing.save_optimizer",)),
    "global_profiler*": PROFILER, "trainer.profile_steps": PROFILER, "ray_kwargs*": RAY, "ray_init*": RAY,
    "hydra*": RAY,
    "transfer_queue*": Left("it only says how batches travel"),
}  # fmt: skip

VERL_PPO_KEYS: KeyTable = {
    **RUN,
    **MACHINES,
    **TRAINER_LEFT,
    # data
    **_together(
        model.translate_data,
        _inside("data", "train_files", "val_files", "train_max_samples", "prompt_key", "shuffle", "seed", "image_key", "video_key"),
        "data.train.dataset_name", "data.validation.dataset_name", "data.train.input_key", "data.train.size", "data.shuffle", "grpo.seed",
    ),
    **_together(
        model.translate_lengths,
        _inside("data", "max_prompt_length", "max_response_length", "truncation", "filter_overlong_prompts"),
        "data.max_input_seq_length", "policy.generation.max_new_tokens", "policy.max_total_sequence_length",
    ),
    "data.apply_chat_template_kwargs": Carried(("policy.tokenizer.chat_template_kwargs",), lambda value: value or None),
    "data.apply_chat_template_kwargs.*": Together(_carry_template, ("policy.tokenizer.chat_template_kwargs",)),
    "data.tokenizer": Left("it is the model's"),
    "data.val_batch_size": Left("validation goes through the same engine, which batches by itself"),
    "data.gen_batch_size": Left("with dynamic sampling, groups are sampled until the batch is full"),
    **dict.fromkeys(_inside("data", "dataloader_num_workers", "filter_overlong_prompts_workers", "use_shm"), LOADER),
    **dict.fromkeys(_inside("data", "return_raw_input_ids", "return_raw_chat", "return_full_prompt", "return_multi_modal_inputs",
                            "image_patch_size", "validation_shuffle", "reward_fn_key", "need_tools_kwargs"),
                            Left("columns are read by name")),
    "data.custom_cls.path": Lacking("data sets of verl are custom code", "Write an environment with its own tasks. Remove the key."),
    "data.custom_cls.name": Left("custom_cls.path says the file"),
    "data.sampler.*": Lacking("samplers are code of verl's", "Remove the keys; data.train entries have weights."),
    "data.datagen.*": Lacking("generators of data are code of verl's", "Write an environment with its own tasks. Remove the keys."),
    # model
    **_together(
        model.translate_model,
        (*_inside(MODEL, "path", "tokenizer_path", "trust_remote_code", "override_config.*"), "data.trust_remote_code",
         "critic.model.trust_remote_code"),
        "policy.model_name", "policy.tokenizer.name", "policy.trust_remote_code", "policy.hf_config_overrides",
    ),
    f"{MODEL}.custom_chat_template": to("policy.tokenizer.chat_template"),
    f"{MODEL}.enable_gradient_checkpointing": to("policy.dtensor_cfg.activation_checkpointing"),
    **_together(
        training.translate_actor_lora, _inside(MODEL, "lora_rank", "lora_alpha", "target_modules", "exclude_modules"),
        *_inside("policy.dtensor_cfg.lora_cfg", "enabled", "dim", "alpha", "target_modules", "exclude_modules"),
    ),
    f"{MODEL}.lora_adapter_path": Lacking("adapters begin anew", "Merge it into the model, and name that. Remove the key."),
    f"{MODEL}.lora.rank": Lacking("adapters of Megatron Core have other names of layers", f"Set {MODEL}.lora_rank and target_modules."),
    f"{MODEL}.lora.*": Left("lora.rank asks for them"),
    f"{MODEL}.mtp.enable": MTP,
    f"{MODEL}.mtp.*": Left("mtp.enable reads it"),
    f"{MODEL}.external_lib": EXTERNAL,
    f"{MODEL}.use_remove_padding": PACKED,
    **dict.fromkeys(_inside(MODEL, "use_liger", "use_fused_kernels", "fused_kernel_options*", "tiled_mlp*", "torch_dtype"), KERNELS),
    **dict.fromkeys(_inside(MODEL, "hf_config_path", "use_shm", "enable_activation_offload", "_target_", "override_config"), MEMORY),
    # actor
    **_together(
        training.translate_batches,
        (*_inside(ACTOR, "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", "use_dynamic_bsz",
            "ppo_epochs"),
         *_inside("critic", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", "use_dynamic_bsz",
                  "ppo_epochs"), "data.train_batch_size", f"{ROLLOUT}.n"),
        "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt", "policy.train_global_batch_size", "grpo.update_epochs",
        "ppo.ppo_epochs", "policy.train_micro_batch_size", "policy.sequence_packing.train_mb_tokens", "value.train_global_batch_size",
    ),
    **_together(
        losses.translate_loss,
        _inside(ACTOR, *losses.CLIPS, "loss_agg_mode", "loss_scale_factor", "entropy_coeff", "tau_pos", "tau_neg", "policy_loss.*"),
        "algorithm.name", "algorithm.objective", "loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max", "loss_fn.ratio_clip_c",
        "loss_fn.aggregation", "loss_fn.constant_length", "loss_fn.entropy_bonus",
    ),
    **_together(
        losses.translate_kl,
        (*_inside(ACTOR, "use_kl_loss", "kl_loss_coef", "kl_loss_type"), *_inside("algorithm", "use_kl_in_reward",
            "kl_penalty", "kl_ctrl.*")),
        "loss_fn.reference_policy_kl_penalty", "loss_fn.reference_policy_kl_type", "loss_fn.use_kl_in_reward", "algorithm.kl.place",
        "algorithm.kl.target", "algorithm.kl.horizon",
    ),
    **_optimizer(f"{ACTOR}.optim", training.translate_actor_optimizer, "policy"),
    **_together(training.translate_actor_optimizer, (f"{ACTOR}.optim.clip_grad", f"{ACTOR}.grad_clip"), "policy.max_grad_norm"),
    **_together(
        training.translate_parallelism,
        (*_inside(ACTOR, "strategy", "ulysses_sequence_parallel_size", "fsdp_config.fsdp_size", "fsdp_config.model_dtype",
            "fsdp_config.dtype"),
         *_inside(f"{ACTOR}.megatron", *training.PARALLEL)),
        "policy.dtensor_cfg.enabled", "policy.dtensor_cfg.context_parallel_size", "policy.dtensor_cfg.dp_replicate_size",
        "policy.weights_dtype", "policy.precision", "policy.megatron_cfg.enabled",
    ),
    **dict.fromkeys(_inside(f"{ACTOR}.fsdp_config", "param_offload", "optimizer_offload", "offload_policy"), OFFLOADING),
    f"{ACTOR}.fsdp_config.mixed_precision.*": Left("gradients are reduced in float32"),
    f"{ACTOR}.fsdp_config.*": SHARDING,
    f"{ACTOR}.megatron.*": MEGATRON_DETAIL,
    f"{ACTOR}.ppo_micro_batch_size": Left("micro-batches are cut for each GPU", ("policy.train_micro_batch_size",)),
    **_together(
        training.translate_router_replay,
        (f"{ACTOR}.router_replay.mode", f"{ROLLOUT}.enable_rollout_routing_replay"),
        "policy.router_replay.enabled",
    ),
    f"{ACTOR}.router_replay.*": Left("router_replay.mode reads it"),
    **dict.fromkeys(_inside(ACTOR, "use_remove_padding", "use_prefix_grouper"), PACKED),
    **dict.fromkeys(_inside(ACTOR, "use_torch_compile", "use_fused_kernels", "entropy_*", "calculate_*", "sum_pi_squared_checkpointing",
                            "load_weight"), MEMORY),
    **_together(training.translate_frozen_tower, (f"{ACTOR}.freeze_vision_tower",), "policy.freeze_vision_tower"),
    **dict.fromkeys(_inside(ACTOR, "shuffle", "data_loader_seed"), Left("mini-batches are shuffled by the run's seed")),
    f"{ACTOR}.checkpoint.*": TRAINER_LEFT["trainer.checkpoint.*"],
    **dict.fromkeys(("*.profiler.*", "*.profiler"), PROFILER),
    **dict.fromkeys(("*._target_", "_target_", f"{ACTOR}.rollout_n", f"{REF}.rollout_n", "critic.rollout_n"), MADE_OF),
    # reference
    f"{REF}.fsdp_config.param_offload": to("policy.reference.offload"),
    f"{REF}.megatron.param_offload": to("policy.reference.offload"),
    f"{REF}.model.path": Lacking("the reference is the policy as it was when the run began"),
    f"{REF}.*": MICRO_BATCHES,
    # rollout
    **_together(
        model.translate_engine,
        (*_inside(ROLLOUT, "name", "temperature", "top_p", "top_k", "do_sample", "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
                  "expert_parallel_size", "gpu_memory_utilization", "enforce_eager", "max_num_seqs", "enable_prefix_caching",
                  "max_model_len",
                  "dtype"), *_inside(f"{ROLLOUT}.val_kwargs", "n", "do_sample", "temperature", "top_p", "top_k")),
        "policy.generation.backend", "policy.generation.temperature", "policy.generation.top_p", "policy.generation.top_k",
        "policy.generation.val_temperature", "policy.generation.val_top_p", "policy.generation.val_top_k",
        "grpo.val_num_generations_per_prompt",
        *_inside(model.VLLM, "tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "gpu_memory_utilization",
                 "enforce_eager", "max_num_seqs", "enable_prefix_caching", "max_model_len", "precision"),
    ),
    **_together(
        model.translate_turns,
        (*_inside(f"{ROLLOUT}.multi_turn", "enable", "tool_config_path", "interaction_config_path"), "data.tool_config_path",
         f"{ROLLOUT}.agent.default_agent_loop"),
    ),
    f"{ROLLOUT}.multi_turn.max_assistant_turns": Carried(("{section}.max_rollout_turns",), lambda value: value or 1),
    **dict.fromkeys((f"{ROLLOUT}.multi_turn.*", f"{ROLLOUT}.agent.*"), Left("multi_turn.enable reads it")),
    f"{ROLLOUT}.ignore_eos": Lacking("a completion ends with its stop token"),
    f"{ROLLOUT}.over_sample_rate": Lacking("rollouts are not thrown away for speed", "Set 0; asynchronous training waits for none."),
    **dict.fromkeys(
        _inside(ROLLOUT, "quantization", "quantization_config_file"),
        Lacking("rollouts in FP8 are said by other keys here", "Set policy.generation.vllm_cfg.precision=fp8. Remove the key."),
    ),
    f"{ROLLOUT}.skip_rollout": Lacking("rollouts are sampled", "Set false."),
    f"{ROLLOUT}.logprobs_mode": Lacking("log-probabilities are those of the sampling distribution", "Set processed_logprobs."),
    f"{ROLLOUT}.mtp.*": Left("model.mtp says it"), f"{ROLLOUT}.mtp": Left("model.mtp says it"),
    f"{ROLLOUT}.log_prob_*": MICRO_BATCHES,
    **dict.fromkeys(_inside(ROLLOUT, "mode", "prompt_length", "response_length", "free_cache_engine", "cudagraph_capture_sizes",
                            "data_parallel_size", "max_num_batched_tokens", "enable_chunked_prefill", "scheduling_policy", "load_format",
                            "disable_log_stats", "multi_stage_wake_up", "engine_kwargs.*", "engine_kwargs", "calculate_log_probs",
                            "checkpoint_engine.*", "checkpoint_engine", "trace.*", "skip_dump_dir", "skip_tokenizer_init", "prometheus.*",
                            "layered_summon", "limit_images", "layer_name_map.*", "enable_sleep_mode",
                            "update_weights_bucket_megabytes"), ENGINE_OPTION),
    "actor_rollout_ref.hybrid_engine": Left("engine and learner share the GPUs", ("policy.generation.colocated.enabled",)),
    "actor_rollout_ref.nccl_timeout": RAY,
    # critic
    **_together(
        training.translate_critic,
        (*_inside("critic", "model.path", "cliprange_value", "grad_clip", "model.enable_gradient_checkpointing",
                  "ulysses_sequence_parallel_size"),
         *_inside("critic.model", "lora_rank", "lora_alpha", "target_modules")),
        "value.model_name", "value_loss_fn.cliprange", "value.max_grad_norm", "value.dtensor_cfg.activation_checkpointing",
        "value.dtensor_cfg.context_parallel_size",
    ),
    **_optimizer("critic.optim", training.translate_critic, "value"),
    "critic.optim.clip_grad": Left("verl reads critic.grad_clip"),
    "critic.model.external_lib": EXTERNAL,
    **dict.fromkeys(("critic.model.*", "critic.megatron.*", "critic.strategy", "critic.load_weight"), SHARDING),
    "critic.enable": Left("gae has a critic, other estimators have none"),
    "critic.loss_agg_mode": Left("the critic's loss is a mean over tokens"),
    "critic.checkpoint.*": TRAINER_LEFT["trainer.checkpoint.*"],
    "critic.*": MICRO_BATCHES,
    # algorithm
    **_together(
        losses.translate_advantage, _inside("algorithm", "adv_estimator", "norm_adv_by_std_in_grpo", "gamma", "lam"),
        "algorithm.advantage", "ppo.adv_estimator.gae_lambda", "ppo.adv_estimator.gae_gamma",
    ),
    **_together(
        losses.translate_correction,
        _inside("algorithm.rollout_correction", "rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold", "bypass_mode",
                "loss_type", "rollout_is_batch_normalize"), "algorithm.corrections", "algorithm.ratio_to",
    ),
    "algorithm.use_pf_ppo": Lacking("rollouts are not sampled again by their rewards", "Set false."),
    "algorithm.pf_ppo*": Left("use_pf_ppo reads it"),
    "algorithm.filter_groups.enable": to("{section}.use_dynamic_sampling"),
    "algorithm.filter_groups.*": Left("groups are sampled until the batch is full", ("grpo.dynamic_sampling_max_gen_batches",)),
    # rewards
    **_together(
        model.translate_rewards,
        (*_inside("reward_model", "enable", "model.path", "reward_manager"), "custom_reward_function.path", "custom_reward_function.name",
         *_inside("reward_model.reward_kwargs", "overlong_buffer_cfg.enable", "overlong_buffer_cfg.len",
             "overlong_buffer_cfg.penalty_factor",
                  "max_resp_len")),
        "env", "data.default.env_name", "grpo.reward_shaping",
    ),
    "reward_model.sandbox_fusion.url": Lacking("programs are not sent to a server", "Write a reward with strop's sandbox. Remove the key."),
    "reward_model.reward_loop_module_path": Lacking("reward managers are code of verl's", "Write an environment. Remove the key."),
    **dict.fromkeys(("reward_model.*", "reward_manager*", "custom_reward_function.*"), Left("the environment scores rollouts by itself")),
}  # fmt: skip


VERL_SFT_KEYS: KeyTable = {
    **RUN,
    **MACHINES,
    **TRAINER_LEFT,
    "trainer.seed": to("sft.seed"),
    **_together(
        model.translate_sft_data,
        _inside("data", "train_batch_size", "micro_batch_size", "micro_batch_size_per_gpu", "max_length", "truncation",
            "train_files", "val_files",
                "train_max_samples", "val_max_samples", "prompt_key", "response_key", "prompt_dict_keys", "response_dict_keys",
                "multiturn.enable", "multiturn.messages_key", "messages_key"),
        "policy.train_global_batch_size", "policy.max_total_sequence_length", "data.train.dataset_name", "data.train.input_key",
    ),
    "data.chat_template": to("policy.tokenizer.chat_template"),
    "data.apply_chat_template_kwargs": Carried(("policy.tokenizer.chat_template_kwargs",), lambda value: value or None),
    "data.apply_chat_template_kwargs.*": Together(_carry_template, ("policy.tokenizer.chat_template_kwargs",)),
    "data.custom_cls.path": Lacking("data sets of verl are custom code", "Give the data columns of messages. Remove the key."),
    "data.multiturn.*": Left("examples have no tools"),
    "data.*": LOADER,
    **_together(
        model.translate_sft_model,
        ("model.path", "model.partial_pretrain", "model.trust_remote_code", "model.enable_gradient_checkpointing",
         "model.fsdp_config.model_dtype", "ulysses_sequence_parallel_size", "engine.strategy"),
        "policy.model_name", "policy.trust_remote_code", "policy.weights_dtype", "policy.dtensor_cfg.context_parallel_size",
    ),
    **_together(
        training.translate_sft_lora, _inside("model", "lora_rank", "lora_alpha", "target_modules", "exclude_modules"),
        *_inside("policy.dtensor_cfg.lora_cfg", "enabled", "dim", "alpha", "target_modules"),
    ),
    "model.external_lib": EXTERNAL,
    **dict.fromkeys(("model.*", "engine.*"), SHARDING),
    **_optimizer("optim", training.translate_sft_optimizer, "policy"),
    "optim.clip_grad": Together(training.translate_sft_optimizer, ("policy.max_grad_norm",)),
    "use_remove_padding": PACKED,
    "checkpoint.*": TRAINER_LEFT["trainer.checkpoint.*"],
    "profiler*": PROFILER,
    "*._target_": MADE_OF,
}  # fmt: skip
