"""Qwen 2, 2.5 and 3, and their mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from strop.extensions.megatron.families.architecture import Architecture, LayerDesign
from strop.extensions.megatron.families.dense import (
    attention_rules,
    dense_architecture,
    dense_fields,
    dense_rules,
    norm_rules,
    outer_rules,
    windowed_layers,
)
from strop.extensions.megatron.families.weight_rules import WeightRule, expert_rules, glu_rules


class Qwen:
    """Qwen 2 and 2.5, with biases of queries, keys and values, and Qwen 3, with norms of queries and keys."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2", "qwen3")

    def architecture(self, hf_config: Any) -> Architecture:
        return dense_architecture(hf_config, transformer=qwen_fields(hf_config), layers=windowed_layers(hf_config))

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        return dense_rules(hf_config)


class QwenMoe:
    """Mixtures of experts of Qwen 2, which have a shared expert with a gate, and of Qwen 3."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2_moe", "qwen3_moe")

    def architecture(self, hf_config: Any) -> Architecture:
        fields = qwen_fields(hf_config) | {
            "num_moe_experts": hf_config.num_experts,
            "moe_router_topk": hf_config.num_experts_per_tok,
            "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
            "moe_router_pre_softmax": not hf_config.norm_topk_prob,  # weights that do not add up to 1
        }
        if hf_config.model_type == "qwen2_moe":
            fields |= {
                "moe_shared_expert_intermediate_size": hf_config.shared_expert_intermediate_size,
                "moe_shared_expert_gate": True,
            }
        layers = tuple(
            LayerDesign(design.window, experts=has_experts(hf_config, index))
            for index, design in enumerate(windowed_layers(hf_config))
        )
        return dense_architecture(hf_config, transformer=fields, layers=layers)

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        return (
            *outer_rules(),
            *attention_rules(hf_config),
            *norm_rules(),
            *glu_rules("mlp.", "mlp."),
            *glu_rules("mlp.shared_expert.", "mlp.shared_experts."),
            WeightRule("layers.mlp.shared_expert_gate.weight", "layers.mlp.shared_experts.gate_weight"),
            WeightRule("layers.mlp.gate.weight", "layers.mlp.router.weight"),
            *expert_rules("gate_proj", "up_proj", "down_proj"),
        )


def qwen_fields(hf_config: Any) -> dict[str, Any]:
    """Return the fields of TransformerConfig, with biases or norms of queries and keys."""
    fields = dense_fields(hf_config)
    if hf_config.model_type.startswith("qwen2"):
        return fields | {"add_qkv_bias": getattr(hf_config, "qkv_bias", True)}
    if hf_config.attention_bias:
        raise ValueError(
            f"{hf_config.model_type}: attention_bias is not in Megatron Core's Qwen 3 here: set policy.backend=torch"
        )
    return fields | {"qk_layernorm": True}


def has_experts(hf_config: Any, layer: int) -> bool:
    return layer not in hf_config.mlp_only_layers and (layer + 1) % hf_config.decoder_sparse_step == 0
