"""Defaults of verl (January 2026) that are not Strop's or that a translation reads. Those of keys that follow others are not here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OPTIMIZER: Mapping[str, Any] = {
    "optimizer": "AdamW", "optimizer_impl": "torch.optim", "lr_warmup_steps_ratio": 0.0, "weight_decay": 0.01, "lr_warmup_steps": -1,
    "betas": [0.9, 0.999], "clip_grad": 1.0, "min_lr_ratio": 0.0, "num_cycles": 0.5, "lr_scheduler_type": "constant",
    "warmup_style": None, "lr_warmup_init": 0.0, "min_lr": 0.0, "lr_decay_steps": None, "weight_decay_incr_style": "constant",
    "lr_wsd_decay_style": "exponential", "lr_wsd_decay_steps": None, "lr_decay_style": None,
    "override_optimizer_config": None, "total_training_steps": -1,
}  # fmt: skip
_MEGATRON: Mapping[str, Any] = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1, "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None, "virtual_pipeline_model_parallel_size": None, "sequence_parallel": True,
}  # fmt: skip


def _inside(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{name}": value for name, value in values.items()}


TRAINER: Mapping[str, Any] = _inside("trainer", {
    "total_epochs": 30, "total_training_steps": None, "project_name": "verl_examples", "experiment_name": "gsm8k",
    "logger": ["console", "wandb"], "nnodes": 1, "n_gpus_per_node": 8, "save_freq": -1, "test_freq": -1, "val_before_train": True,
    "val_only": False, "critic_warmup": 0, "resume_mode": "auto", "resume_from_path": None, "log_val_generations": 0,
    "max_actor_ckpt_to_keep": None, "default_local_dir": "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
    "device": "cuda",
})  # fmt: skip

PPO_DEFAULTS: Mapping[str, Any] = {
    **TRAINER,
    **_inside("data", {
        "train_files": "~/data/rlhf/gsm8k/train.parquet", "val_files": "~/data/rlhf/gsm8k/test.parquet", "train_max_samples": -1,
        "val_max_samples": -1, "prompt_key": "prompt", "reward_fn_key": "data_source", "max_prompt_length": 512, "max_response_length": 512,
        "train_batch_size": 1024, "shuffle": True, "seed": None, "filter_overlong_prompts": False, "truncation": "error",
        "image_key": "images",
        "video_key": "videos", "apply_chat_template_kwargs": {}, "gen_batch_size": None, "return_raw_chat": True,
    }),
    **_inside("actor_rollout_ref.model", {
        "path": "~/models/deepseek-llm-7b-chat", "tokenizer_path": None, "trust_remote_code": False, "custom_chat_template": None,
        "override_config": {}, "enable_gradient_checkpointing": True, "lora_rank": 0, "lora_alpha": 16, "target_modules": "all-linear",
        "exclude_modules": None, "lora_adapter_path": None, "external_lib": None,
    }),
    **_inside("actor_rollout_ref.actor", {
        "strategy": "fsdp", "ppo_mini_batch_size": 256, "ppo_micro_batch_size": None, "ppo_micro_batch_size_per_gpu": None,
        "use_dynamic_bsz": False, "ppo_max_token_len_per_gpu": 16384, "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2,
        "clip_ratio_c": 3.0, "tau_pos": 1.0, "tau_neg": 1.05, "loss_agg_mode": "token-mean", "loss_scale_factor": None, "entropy_coeff": 0,
        "use_kl_loss": False, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl", "ppo_epochs": 1, "grad_clip": 1.0,
        "ulysses_sequence_parallel_size": 1, "router_replay.mode": "disabled",
    }),
    **_inside("actor_rollout_ref.actor.policy_loss", {
        "loss_mode": "vanilla", "clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "kl_cov_ratio": 0.0002,
        "ppo_kl_coef": 0.1,
    }),
    **_inside("actor_rollout_ref.actor.optim", {**_OPTIMIZER, "lr": 1e-6}),
    **_inside("actor_rollout_ref.actor.fsdp_config", {"fsdp_size": -1, "model_dtype": "fp32", "dtype": "bfloat16", "strategy": "fsdp"}),
    **_inside("actor_rollout_ref.actor.megatron", _MEGATRON),
    **_inside("actor_rollout_ref.ref", {"fsdp_config.param_offload": False, "log_prob_micro_batch_size_per_gpu": None}),
    **_inside("actor_rollout_ref.rollout", {
        "name": None, "temperature": 1.0, "top_k": -1, "top_p": 1, "n": 1, "dtype": "bfloat16", "gpu_memory_utilization": 0.5,
        "enforce_eager": False, "tensor_model_parallel_size": 2, "data_parallel_size": 1, "expert_parallel_size": 1,
        "pipeline_model_parallel_size": 1, "max_model_len": None, "max_num_seqs": 256, "enable_prefix_caching": True, "ignore_eos": False,
        "do_sample": True, "val_kwargs.top_k": -1, "val_kwargs.top_p": 1.0, "val_kwargs.temperature": 0, "val_kwargs.n": 1,
        "val_kwargs.do_sample": False, "multi_turn.enable": False, "multi_turn.max_assistant_turns": None,
        "agent.default_agent_loop": "single_turn_agent", "logprobs_mode": "processed_logprobs", "log_prob_use_dynamic_bsz": None,
        "multi_turn.format": "hermes",
    }),
    **_inside("critic", {
        "strategy": "fsdp", "cliprange_value": 0.5, "grad_clip": 1.0, "ulysses_sequence_parallel_size": 1,
        "model.path": "~/models/deepseek-llm-7b-chat", "model.enable_gradient_checkpointing": True, "model.lora_rank": 0,
        "model.lora_alpha": 16, "model.target_modules": "all-linear", "model.trust_remote_code": False,
    }),
    **_inside("critic.optim", {**_OPTIMIZER, "lr": 1e-5}),
    **_inside("algorithm", {
        "gamma": 1.0, "lam": 1.0, "adv_estimator": "gae", "norm_adv_by_std_in_grpo": True, "use_kl_in_reward": False, "kl_penalty": "kl",
        "kl_ctrl.type": "fixed", "kl_ctrl.kl_coef": 0.001, "kl_ctrl.horizon": 10000, "kl_ctrl.target_kl": 0.1, "use_pf_ppo": False,
    }),
    **_inside("algorithm.rollout_correction", {
        "rollout_is": None, "rollout_is_threshold": 2.0, "rollout_rs": None, "rollout_rs_threshold": None, "bypass_mode": False,
        "loss_type": "ppo_clip", "rollout_is_batch_normalize": False,
    }),
    **_inside("reward_model", {"enable": False, "reward_manager": "naive", "model.path": "~/models/FsfairX-LLaMA3-RM-v0.1"}),
    "custom_reward_function.path": None, "custom_reward_function.name": "compute_score", "transfer_queue.enable": False,
}  # fmt: skip

SFT_DEFAULTS: Mapping[str, Any] = {
    **TRAINER, "trainer.total_epochs": 4, "trainer.project_name": "gsm8k-sft", "trainer.experiment_name": "test", "trainer.seed": 1,
    "trainer.max_ckpt_to_keep": None,
    **_inside("data", {
        "train_batch_size": 256, "micro_batch_size_per_gpu": 4, "train_files": "~/data/gsm8k/train.parquet",
        "val_files": "~/data/gsm8k/test.parquet", "train_max_samples": -1, "val_max_samples": -1, "prompt_key": "question",
        "response_key": "answer", "prompt_dict_keys": None, "response_dict_keys": None, "multiturn.enable": False,
        "multiturn.messages_key": "messages", "max_length": 1024, "truncation": "error", "chat_template": None,
        "apply_chat_template_kwargs": {}, "messages_key": "messages", "use_dynamic_bsz": False, "max_token_len_per_gpu": 8192,
    }),
    **_inside("model", {
        "partial_pretrain": "~/models/gemma-1.1-7b-it", "path": None, "enable_gradient_checkpointing": True, "trust_remote_code": False,
        "lora_rank": 0, "lora_alpha": 16, "target_modules": "all-linear", "strategy": "fsdp2", "fsdp_config.model_dtype": "fp32",
        "external_lib": None,
    }),
    **_inside("optim", {
        **_OPTIMIZER, "lr": 1e-5, "betas": [0.9, 0.95], "lr_warmup_steps_ratio": 0.1, "clip_grad": 1.0, "lr_scheduler": "cosine",
    }),
    "ulysses_sequence_parallel_size": 1, "engine.strategy": "fsdp",
}  # fmt: skip
