"""Tiny models of the families that Megatron Core's models have. It knows Transformers alone."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 93,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 2.5,
}
INDEXER = {"q_lora_rank": 12, "n_group": 1, "topk_group": 1, "index_topk": 6, "index_head_dim": 8, "index_n_heads": 3}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
PATTERN = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GEMMA = {"head_dim": 8, "sliding_window": 7, "layer_types": PATTERN, "tie_word_embeddings": True}

DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 4,
    "full_attention_interval": 2,
}
MAMBA = {"pad_token_id": 146, "head_dim": 8, "ssm_state_size": 6, "mamba_num_heads": 8, "mamba_head_dim": 6, "n_groups": 4}

# Name of a case -> (class of the configuration, fields beside SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-3.1": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-yarn": (
        "Qwen2Config",
        {"rope_parameters": YARN, "sliding_window": 6, "use_sliding_window": True, "max_window_layers": 2},
    ),
    "qwen2_moe": ("Qwen2MoeConfig", {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, **EXPERTS}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 16, "norm_topk_prob": True, **EXPERTS}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "gemma": ("GemmaConfig", {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 11},
    ),
    "gemma3": ("Gemma3TextConfig", GEMMA),
    "deepseek_v2": ("DeepseekV2Config", {**LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3Config", {**LATENT, "q_lora_rank": 12, "n_group": 4, "topk_group": 1}),
    "deepseek_v3-yarn": (
        "DeepseekV3Config",
        {
            **LATENT,
            "q_lora_rank": 12,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v32": ("DeepseekV32Config", {**LATENT, **INDEXER}),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        {**LATENT, **INDEXER, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "head_dim": 8,
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 2.5,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "sliding_window": 7,
            "swiglu_limit": 0.5,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "nemotron": ("NemotronConfig", {"head_dim": 8}),
    "qwen3_next": ("Qwen3NextConfig", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [2]}),
    "qwen3_5": ("Qwen3_5TextConfig", {**DELTA, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 40}),
    "nemotron_h": ("NemotronHConfig", {**MAMBA, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}),
    "nemotron_h-moe": (
        "NemotronHConfig",
        {
            **MAMBA,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 8,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
            "moe_latent_size": 20,
        },
    ),
}


def make_config(name: str, **changes: Any) -> Any:
    import transformers

    kind, fields = FAMILIES[name]
    return getattr(transformers, kind)(**SIZES | fields | changes)


def make_model(name: str, dtype: torch.dtype, **changes: Any) -> Any:
    """Return a model with random weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(make_config(name, **changes)).to(dtype).eval()
    randomize(model)
    if dtype == torch.float64:
        make_exact(model)
    return model


def make_exact(model: Any) -> None:
    """Let a float64 model compute in float64."""
    model.set_experts_implementation("eager")  # the grouped kernel has no float64
    for module in list(model.modules()):
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = partial(_exact_norm, module)
        elif name.endswith("RMSNormGated"):
            module.forward = partial(_exact_gated_norm, module)
        elif name.endswith(("GatedDeltaNet", "Mamba2Mixer")):
            module.forward = partial(_without_float, module.forward)


def _exact_norm(norm: Any, hidden: Tensor) -> Tensor:
    """Compute a root mean square norm without Transformers' cast to float32."""
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    weight = 1.0 + norm.weight if type(norm).__name__.startswith(("Gemma", "Qwen3Next", "Qwen3_5")) else norm.weight
    return weight * _normalize(hidden, eps)


def _exact_gated_norm(norm: Any, hidden: Tensor, gate: Tensor) -> Tensor:
    gate = torch.nn.functional.silu(gate)
    if not hasattr(norm, "group_size"):
        return norm.weight * _normalize(hidden, norm.variance_epsilon) * gate
    groups = (hidden * gate).unflatten(-1, (-1, norm.group_size))
    return norm.weight * _normalize(groups, norm.variance_epsilon).flatten(-2)


def _normalize(hidden: Tensor, eps: float) -> Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)


def _without_float(forward: Any, *arguments: Any, **options: Any) -> Tensor:
    with mock.patch.object(Tensor, "float", lambda values: values):
        return forward(*arguments, **options)


def randomize(model: Any, seed: int = 0) -> None:
    """Draw all weights, with norms around the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * (0.15 if tensor.dim() > 1 else 0.1)
            tensor.copy_(noise + (1.0 if "norm" in name and tensor.mean() > 0.5 else 0.0))
