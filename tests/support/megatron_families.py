"""Tiny models of the families that Megatron Core's models have."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from support.megatron_stages import randomize

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

# Name of a case -> (class of the configuration, fields beside SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 16, "norm_topk_prob": True, **EXPERTS}),
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
    model.set_experts_implementation("eager")  # the grouped kernel has no float64
    if dtype == torch.float64:
        for module in list(model.modules()):
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(_exact_norm, module)
    return model


def _exact_norm(norm: Any, hidden: Tensor) -> Tensor:
    """Compute a root mean square norm without Transformers' cast to float32."""
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    weight = 1.0 + norm.weight if type(norm).__name__.startswith("Gemma") else norm.weight
    return weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)


def finish_logits(hf_config: Any, logits: Tensor) -> Tensor:
    """Apply what the configuration says of logits."""
    cap = getattr(hf_config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)
