"""Sections ``policy.generation`` (``generation`` of an evaluation) and how weights reach the engines."""

from __future__ import annotations

from strop.config.recipes.rules import Refused, Rule, Unused

WEIGHT_SYNC = "policy.generation.weight_sync configures how weights are sent"
FP8 = "rollouts use the trained weights, not FP8"

GENERATION_RULES: tuple[Rule, ...] = (
    Unused("*generation.port_range_*", "free ports are chosen automatically"),
    Refused(
        ("*generation.refit_transport",),
        "this is NeMo-RL's transport",
        "Use policy.generation.weight_sync.transport. Remove the key.",
    ),
    Unused("*generation.refit_*", WEIGHT_SYNC),
    Unused("*generation.real_quant_export_cpu_offload", "quantised models are not in this version"),
    Unused("*generation.mcore_generation_config", "the Megatron generation backend is not in this version"),
    Unused("*generation.vllm_cfg.use_tqdm", "the console shows the progress of a step"),
    Unused("*generation.vllm_cfg.*vllm_metrics_logger*", "the engine's statistics are logged at every step"),
    Unused("*generation.vllm_cfg.load_format", "weights are published by the learner"),
    Unused("*generation.vllm_cfg.skip_tokenizer_init", "stop strings need the tokenizer"),
    Refused(
        ("*generation.vllm_cfg.distributed_executor_backend",),
        "the engine chooses it",
        "Use policy.generation.vllm_kwargs. Remove the key.",
    ),
    Unused("*generation.vllm_cfg.*_refit_*", WEIGHT_SYNC),
    Refused(("*generation.vllm_cfg.reset_encoder_cache_after_weight_update",), "models read only text", "Remove the key."),
    Refused(("*generation.vllm_cfg.use_deep_gemm",), FP8, "Remove the key."),
    Refused(
        ("*generation.vllm_cfg.num_first_layers_in_bf16", "*generation.vllm_cfg.num_last_layers_in_bf16"), FP8, "Remove the key."
    ),
)
