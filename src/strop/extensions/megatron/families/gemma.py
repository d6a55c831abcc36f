"""Gemma 1, 2 and 3: scaled embeddings, norms with weights around 0; from 2 on norms after attention and MLP, and windows in a pattern."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from strop.extensions.megatron.families.architecture import Architecture, LayerDesign
from strop.extensions.megatron.families.dense import (
    attention_rules,
    dense_architecture,
    dense_fields,
    dense_rules,
    head_size,
    outer_rules,
    windowed_layers,
)
from strop.extensions.megatron.families.rotary_frequencies import rotary_of
from strop.extensions.megatron.families.weight_rules import WeightRule, glu_rules


class Gemma:
    """Gemma 1."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma",)

    def architecture(self, hf_config: Any) -> Architecture:
        return gemma_architecture(hf_config)

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        return dense_rules(hf_config)


class Gemma2:
    """Gemma 2, and the text models of Gemma 3, which have two rotary embeddings and norms of queries and keys."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma2", "gemma3_text")

    def architecture(self, hf_config: Any) -> Architecture:
        changes: dict[str, Any] = {"softmax_scale": hf_config.query_pre_attn_scalar**-0.5}
        layers, rotaries = windowed_layers(hf_config), {}
        if hf_config.model_type == "gemma3_text":
            changes["qk_layernorm"] = True
            kinds = sorted(set(hf_config.layer_types))
            layers = tuple(
                LayerDesign(design.window, rotary=kinds.index(kind))
                for design, kind in zip(layers, hf_config.layer_types, strict=True)
            )
            rotaries = {"rotaries": tuple(rotary_of(hf_config, head_size(hf_config), kind) for kind in kinds)}
        return gemma_architecture(
            hf_config,
            transformer=changes,
            layers=layers,
            post_norms=True,
            softcap=hf_config.attn_logit_softcapping,
            **rotaries,
        )

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        post = "post_layernorm.weight"
        return (
            *outer_rules(),
            *attention_rules(hf_config),
            *glu_rules("mlp.", "mlp."),
            WeightRule("layers.input_layernorm.weight", "layers.input_layernorm.weight"),
            WeightRule("layers.post_attention_layernorm.weight", f"layers.self_attention.linear_proj.{post}"),
            WeightRule("layers.pre_feedforward_layernorm.weight", "layers.pre_mlp_layernorm.weight"),
            WeightRule("layers.post_feedforward_layernorm.weight", f"layers.mlp.linear_fc2.{post}"),
        )


def gemma_architecture(hf_config: Any, **changes: Any) -> Architecture:
    if getattr(hf_config, "use_bidirectional_attention", None):
        raise ValueError(f"{hf_config.model_type}: use_bidirectional_attention is not causal; only embedding models have it")
    name = getattr(hf_config, "hidden_activation", None) or hf_config.hidden_act
    transformer = dense_fields(hf_config, hidden_act=name) | changes.pop("transformer", {})
    scale = float(hf_config.hidden_size) ** 0.5
    return dense_architecture(hf_config, transformer=transformer, norm="rms_plus_one", embedding_scale=scale, **changes)
