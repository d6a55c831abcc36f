"""Nemotron: squared ReLU without a gate, layer norms with weights around 0, a partly rotated head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from strop.extensions.megatron.families.architecture import Architecture
from strop.extensions.megatron.families.dense import (
    activation,
    attention_rules,
    dense_architecture,
    head_size,
    norm_rules,
    outer_rules,
)
from strop.extensions.megatron.families.weight_rules import WeightRule


class Nemotron:
    """Nemotron 3 8B, Nemotron 4, Minitron."""

    model_types: ClassVar[tuple[str, ...]] = ("nemotron",)

    def architecture(self, hf_config: Any) -> Architecture:
        if hf_config.attention_bias or hf_config.mlp_bias:
            raise ValueError(
                "nemotron: attention_bias and mlp_bias are not in Megatron Core's Nemotron here: set policy.backend=torch"
            )
        fields = {
            "hidden_size": hf_config.hidden_size,
            "num_attention_heads": hf_config.num_attention_heads,
            "num_query_groups": hf_config.num_key_value_heads,
            "kv_channels": head_size(hf_config),
            "ffn_hidden_size": hf_config.intermediate_size,
            "gated_linear_unit": False,
            "activation_func": activation(hf_config, hf_config.hidden_act),
            "normalization": "LayerNorm",
            "layernorm_epsilon": hf_config.norm_eps,
            "add_bias_linear": False,
        }
        return dense_architecture(hf_config, transformer=fields, norm="layer_norm_plus_one")

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        return (
            *outer_rules(),
            *attention_rules(hf_config),
            *norm_rules(),
            WeightRule("layers.mlp.up_proj.weight", "layers.mlp.linear_fc1.weight", 0),
            WeightRule("layers.mlp.down_proj.weight", "layers.mlp.linear_fc2.weight", 1),
        )
