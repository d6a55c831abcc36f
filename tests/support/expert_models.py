"""Small mixtures of experts that vLLM has kernels for on a CPU."""

from __future__ import annotations

from typing import Any

from support.models import VOCABULARY
from support.tokenizer import END

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,  # odd: the second of two ranks has fewer rows, and padding
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,  # fewer than ranks: both hold it
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
}


def experts_family(name: str, transformers: Any) -> Any:
    chosen = {"num_experts_per_tok": 2, "moe_intermediate_size": 72}  # 72: not a multiple of 32, to which the CPU kernel pads
    if name == "mixtral":  # other names in vLLM
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))
    if name == "gpt_oss":  # gate and up alternate, transposed, with biases; attention sinks
        layers = ["sliding_attention", "full_attention"]
        config = transformers.GptOssConfig(
            **SIZES, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=64, layer_types=layers
        )
        return transformers.GptOssForCausalLM(config)
    if name == "qwen2_moe":  # a shared expert with a gate
        shared = {"shared_expert_intermediate_size": 96, "decoder_sparse_step": 1, "num_experts": 4}
        return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**SIZES, **chosen, **shared))
    if name == "glm4_moe":  # groups of experts, a bias that chooses, a dense layer
        groups = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        return transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**SIZES, **chosen, **groups, head_dim=32))
    if name == "deepseek_v3":  # latent attention, of the one size that vLLM's CPU kernel has, and the experts of GLM 4
        groups: dict[str, Any] = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
        groups["first_k_dense_replace"] = 1
        groups |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # as the checkpoints say; vLLM has other defaults
        latent = {"kv_lora_rank": 512, "q_lora_rank": 24, "qk_rope_head_dim": 64, "qk_nope_head_dim": 16, "v_head_dim": 16}
        sizes = SIZES | {"num_key_value_heads": 4}
        return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes, **chosen, **groups, **latent))
    sizes = SIZES | {"head_dim": 32, "num_experts": 4, "decoder_sparse_step": 1}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **chosen))
