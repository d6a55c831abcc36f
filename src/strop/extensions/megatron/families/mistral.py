"""Mistral, with a sliding window in every layer, and Mixtral's mixtures of experts."""

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
)
from strop.extensions.megatron.families.weight_rules import WeightRule, expert_rules

FILES = "layers.block_sparse_moe"  # names of Mixtral's files


class Mistral:
    """Mistral."""

    model_types: ClassVar[tuple[str, ...]] = ("mistral",)

    def architecture(self, hf_config: Any) -> Architecture:
        return dense_architecture(hf_config, layers=(LayerDesign(hf_config.sliding_window),) * hf_config.num_hidden_layers)

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        return dense_rules(hf_config)


class Mixtral:
    """Mixtral: experts in every layer."""

    model_types: ClassVar[tuple[str, ...]] = ("mixtral",)

    def architecture(self, hf_config: Any) -> Architecture:
        experts = dense_fields(hf_config) | {
            "num_moe_experts": hf_config.num_local_experts,
            "moe_router_topk": hf_config.num_experts_per_tok,
            "moe_ffn_hidden_size": hf_config.intermediate_size,
        }
        design = LayerDesign(hf_config.sliding_window, experts=True)
        return dense_architecture(hf_config, transformer=experts, layers=(design,) * hf_config.num_hidden_layers)

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        return (
            *outer_rules(),
            *attention_rules(hf_config),
            *norm_rules(),
            WeightRule("layers.mlp.gate.weight", "layers.mlp.router.weight", aliases=(f"{FILES}.gate.weight",)),
            *expert_rules("w1", "w3", "w2", f"{FILES}.experts"),
        )
