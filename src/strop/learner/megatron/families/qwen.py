"""Qwen 2, 2.5 and 3, and Qwen 3's mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from strop.learner.megatron.families.dense import (
    activation,
    attention_rules,
    dense_architecture,
    dense_rules,
    norm_rules,
    outer_rules,
)
from strop.learner.megatron.models.architecture import Architecture, LayerDesign
from strop.learner.megatron.weights.weight_rules import WeightRule, expert_rules, glu_rules


class Qwen:
    """Qwen 2 and 2.5, with biases of queries, keys and values, and Qwen 3, with norms of queries and keys."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2", "qwen3")

    def architecture(self, hf_config: Any) -> Architecture:
        return dense_architecture(hf_config, transformer=attention_fields(hf_config), layers=windowed_layers(hf_config))

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        return dense_rules(hf_config)


class QwenMoe:
    """Qwen 3's mixtures of experts."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_moe",)

    def architecture(self, hf_config: Any) -> Architecture:
        experts = {
            "num_moe_experts": hf_config.num_experts,
            "moe_router_topk": hf_config.num_experts_per_tok,
            "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
            "moe_router_pre_softmax": not hf_config.norm_topk_prob,
            "activation_func": activation(hf_config, hf_config.hidden_act),
        }
        layers = tuple(
            LayerDesign(window=design.window, experts=has_experts(hf_config, index))
            for index, design in enumerate(windowed_layers(hf_config))
        )
        return dense_architecture(hf_config, transformer=attention_fields(hf_config) | experts, layers=layers)

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        return (
            *outer_rules(),
            *attention_rules(hf_config),
            *norm_rules(),
            *glu_rules("mlp.", "mlp."),
            WeightRule("layers.mlp.gate.weight", "layers.mlp.router.weight"),
            *expert_rules("gate_proj", "up_proj", "down_proj"),
        )


def attention_fields(hf_config: Any) -> dict[str, Any]:
    if hf_config.model_type == "qwen2":
        return {"add_qkv_bias": True}
    if hf_config.attention_bias:
        raise ValueError(
            f"{hf_config.model_type}: attention_bias is not in Megatron Core's Qwen 3 here: set policy.backend=torch"
        )
    return {"qk_layernorm": True}


def windowed_layers(hf_config: Any) -> tuple[LayerDesign, ...]:
    """Return the layers, those of type sliding_attention with the window."""
    types = getattr(hf_config, "layer_types", None)
    if types is None:
        return (LayerDesign(window=getattr(hf_config, "sliding_window", None)),) * hf_config.num_hidden_layers
    return tuple(LayerDesign(window=hf_config.sliding_window if kind == "sliding_attention" else None) for kind in types)


def has_experts(hf_config: Any, layer: int) -> bool:
    return layer not in hf_config.mlp_only_layers and (layer + 1) % hf_config.decoder_sparse_step == 0
