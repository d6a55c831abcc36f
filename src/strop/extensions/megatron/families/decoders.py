"""Families of decoders: Llama, Mistral, Qwen, Gemma, Nemotron, GLM 4.5, gpt-oss, and DeepSeek 2 and 3."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from strop.extensions.megatron.families.architecture import (
    Architecture,
    IndexerSizes,
    LayerDesign,
    PartsOrder,
    WeightRule,
    activation,
    attention_rules,
    dense_architecture,
    dense_fields,
    dense_rules,
    expert_rules,
    glu_rules,
    head_size,
    norm_rules,
    outer_rules,
    rotary_of,
    windowed_layers,
)


class Llama:
    """Llama, and models with its configuration (SmolLM2)."""

    model_types: ClassVar[tuple[str, ...]] = ("llama",)

    def architecture(self, hf_config: Any) -> Architecture:
        if hf_config.attention_bias or hf_config.mlp_bias:
            raise ValueError("llama: attention_bias and mlp_bias are not in Megatron Core's Llama here: set policy.backend=torch")
        return dense_architecture(hf_config)

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        return dense_rules(hf_config)


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
    return fields | {"qk_layernorm": True} | check_unbiased(hf_config, "attention_bias")


def check_unbiased(hf_config: Any, *keys: str) -> dict[str, Any]:
    """Return no fields. Raises ValueError for a model with one of these biases."""
    for key in keys:
        if getattr(hf_config, key, False):
            raise ValueError(f"{hf_config.model_type}: {key} is not in Megatron Core's model here: set policy.backend=torch")
    return {}


def has_experts(hf_config: Any, layer: int) -> bool:
    return layer not in hf_config.mlp_only_layers and (layer + 1) % hf_config.decoder_sparse_step == 0


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


class GlmMoe:
    """GLM 4.5, 4.6 and 4.7: DeepSeek's experts with grouped-query attention."""

    model_types: ClassVar[tuple[str, ...]] = ("glm4_moe",)

    def architecture(self, hf_config: Any) -> Architecture:
        fields = dense_fields(hf_config) | sigmoid_fields(hf_config)
        fields |= {"add_qkv_bias": hf_config.attention_bias, "qk_layernorm": hf_config.use_qk_norm}
        return dense_architecture(hf_config, transformer=fields, layers=sparse_layers(hf_config))

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        return (*outer_rules(), *attention_rules(hf_config), *norm_rules(), *shared_expert_rules())


class GptOss:
    """gpt-oss: attention with sinks, and experts with biases, whose gates and ups alternate in files."""

    model_types: ClassVar[tuple[str, ...]] = ("gpt_oss",)

    def architecture(self, hf_config: Any) -> Architecture:
        if not hf_config.attention_bias:
            raise ValueError("gpt_oss: attention_bias=false is not in Megatron Core's gpt-oss here: set policy.backend=torch")
        fields = dense_fields(hf_config) | {
            "add_bias_linear": True,
            "num_moe_experts": hf_config.num_local_experts,
            "moe_router_topk": hf_config.num_experts_per_tok,
            "moe_ffn_hidden_size": hf_config.intermediate_size,
            "activation_func": partial(sigmoid_gate, slope=hf_config.swiglu_alpha),
            "activation_func_clamp_value": hf_config.swiglu_limit,
            "glu_linear_offset": 1.0,
        }
        layers = tuple(LayerDesign(design.window, experts=True) for design in windowed_layers(hf_config))
        return dense_architecture(hf_config, transformer=fields, layers=layers, norm="rms_wide", sinks=True)

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        experts, local = "layers.mlp.experts.", "layers.mlp.experts.local_experts.{expert}."
        alternate = PartsOrder((1, 1), (0, 1), hf_config.intermediate_size)
        return (
            *outer_rules(),
            *attention_rules(hf_config),
            WeightRule("layers.self_attn.o_proj.bias", "layers.self_attention.linear_proj.bias"),
            WeightRule("layers.self_attn.sinks", "layers.self_attention.core_attention.softmax_offset", 0),
            *norm_rules(),
            WeightRule("layers.mlp.router.weight", "layers.mlp.router.weight"),
            WeightRule("layers.mlp.router.bias", "layers.mlp.router.bias"),
            WeightRule(f"{experts}gate_up_proj", f"{local}linear_fc1.weight", 0, alternate, transposed=True),
            WeightRule(f"{experts}gate_up_proj_bias", f"{local}linear_fc1.bias", 0, alternate),
            WeightRule(f"{experts}down_proj", f"{local}linear_fc2.weight", 1, transposed=True),
            WeightRule(f"{experts}down_proj_bias", f"{local}linear_fc2.bias"),
        )


def sigmoid_gate(gate: Tensor, slope: float) -> Tensor:
    return gate * torch.sigmoid(slope * gate)


class DeepSeek:
    """DeepSeek 3, and models with its configuration (Moonlight), DeepSeek 2 without groups of experts; DeepSeek 3.2 and GLM 5, whose
    attention has indexers."""

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")

    def architecture(self, hf_config: Any) -> Architecture:
        if hf_config.attention_bias or not getattr(hf_config, "rope_interleave", True):
            raise ValueError(
                f"{hf_config.model_type}: Megatron Core's latent attention here has attention_bias=false and rope_interleave=true: "
                "set policy.backend=torch"
            )
        routed = hf_config.model_type != "deepseek_v2"
        fields = dense_fields(hf_config) | latent_fields(hf_config)
        fields |= (sigmoid_fields if routed else softmax_fields)(hf_config)
        return dense_architecture(
            hf_config,
            transformer=fields,
            layers=sparse_layers(hf_config),
            rotaries=(rotary_of(hf_config, hf_config.qk_rope_head_dim),),
            latent_attention=True,
            indexer=indexer_sizes(hf_config),
        )

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        return (*outer_rules(), *latent_rules(), *indexer_rules(), *norm_rules(), *shared_expert_rules())


def sparse_layers(hf_config: Any) -> tuple[LayerDesign, ...]:
    """Return layers of which the first have no experts, and some share the choice of an indexer in a layer before them."""
    first, count = hf_config.first_k_dense_replace, hf_config.num_hidden_layers
    kinds = getattr(hf_config, "mlp_layer_types", None) or ["sparse" if index >= first else "dense" for index in range(count)]
    shared = getattr(hf_config, "indexer_types", None) or ["full"] * count
    chooser: int | None = None
    layers: list[LayerDesign] = []
    for index, (kind, indexer) in enumerate(zip(kinds, shared, strict=True)):
        chooser = index if indexer == "full" and hasattr(hf_config, "index_topk") else chooser
        layers.append(LayerDesign(experts=kind == "sparse", chooser=chooser))
    return tuple(layers)


def indexer_sizes(hf_config: Any) -> IndexerSizes | None:
    if not hasattr(hf_config, "index_topk"):
        return None
    interleaved = hf_config.model_type == "glm_moe_dsa"
    return IndexerSizes(hf_config.index_n_heads, hf_config.index_head_dim, hf_config.index_topk, interleaved)


def indexer_rules() -> Sequence[WeightRule]:
    names = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
    return [WeightRule(f"layers.self_attn.indexer.{name}", f"layers.self_attention.indexer.{name}") for name in names]


def shared_expert_rules() -> Sequence[WeightRule]:
    """Return the rules of MLPs without and with experts, which have shared ones and a bias that chooses among the routed ones."""
    return (
        *glu_rules("mlp.", "mlp."),
        *glu_rules("mlp.shared_experts.", "mlp.shared_experts."),
        WeightRule("layers.mlp.gate.weight", "layers.mlp.router.weight"),
        WeightRule("layers.mlp.gate.e_score_correction_bias", "layers.mlp.router.expert_bias", dtype=torch.float32),
        *expert_rules("gate_proj", "up_proj", "down_proj"),
    )


def latent_fields(hf_config: Any) -> dict[str, Any]:
    scaling = hf_config.rope_parameters
    all_dims = scaling.get("mscale_all_dim", 0)
    scaled = scaling.get("rope_type", "default") != "default" and all_dims  # then scores are scaled too
    return {
        "num_query_groups": hf_config.num_attention_heads,
        "q_lora_rank": hf_config.q_lora_rank,
        "kv_lora_rank": hf_config.kv_lora_rank,
        "qk_head_dim": hf_config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf_config.qk_rope_head_dim,
        "v_head_dim": hf_config.v_head_dim,
        "rope_type": "rope",  # its own embedding is not used
        "rotary_scaling_factor": float(scaling["factor"]) if scaled else 1.0,
        "mscale_all_dim": float(all_dims) if scaled else 1.0,
    }


def expert_fields(hf_config: Any) -> dict[str, Any]:
    return {
        "num_moe_experts": hf_config.n_routed_experts,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": hf_config.moe_intermediate_size * hf_config.n_shared_experts,
        "moe_router_topk_scaling_factor": hf_config.routed_scaling_factor,
    }


def sigmoid_fields(hf_config: Any) -> dict[str, Any]:
    """Return the routing of DeepSeek 3: by sigmoids and a bias, in the best groups of experts."""
    if not hf_config.norm_topk_prob:
        raise ValueError(
            f"{hf_config.model_type}: norm_topk_prob=false is not in Megatron Core's router: set policy.backend=torch"
        )
    groups, chosen = hf_config.n_group or 1, hf_config.topk_group or 1
    fields = expert_fields(hf_config) | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    if chosen < groups:
        best = hf_config.num_experts_per_tok // chosen
        if best != 2:
            raise ValueError(
                f"{hf_config.model_type}: a group of experts is chosen by its best two here and by its best {best} in Megatron Core "
                f"(num_experts_per_tok={hf_config.num_experts_per_tok}, topk_group={chosen}): set policy.backend=torch"
            )
        fields |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    return fields


def softmax_fields(hf_config: Any) -> dict[str, Any]:
    """Return the routing of DeepSeek 2."""
    if hf_config.topk_method != "greedy":
        raise ValueError(
            f"deepseek_v2: topk_method={hf_config.topk_method} chooses a group of experts by its best one, which Megatron Core's router "
            "does not: set policy.backend=torch"
        )
    return expert_fields(hf_config) | {"moe_router_pre_softmax": True}


def latent_rules() -> Sequence[WeightRule]:
    attention, parameter = "layers.self_attn.", "layers.self_attention."
    return (
        WeightRule(f"{attention}q_proj.weight", f"{parameter}linear_q_proj.weight", 0),
        WeightRule(f"{attention}q_a_proj.weight", f"{parameter}linear_q_down_proj.weight", 0),
        WeightRule(f"{attention}q_a_layernorm.weight", f"{parameter}q_layernorm.weight"),
        WeightRule(f"{attention}q_b_proj.weight", f"{parameter}linear_q_up_proj.weight", 0),
        WeightRule(f"{attention}kv_a_proj_with_mqa.weight", f"{parameter}linear_kv_down_proj.weight", 0),
        WeightRule(f"{attention}kv_a_layernorm.weight", f"{parameter}kv_layernorm.weight"),
        WeightRule(f"{attention}kv_b_proj.weight", f"{parameter}linear_kv_up_proj.weight", 0),
        WeightRule(f"{attention}o_proj.weight", f"{parameter}linear_proj.weight", 1),
    )
