"""DeepSeek 2 and 3: latent attention, routed and shared experts after dense layers. Heads of multi-token prediction are not read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from strop.extensions.megatron.families.architecture import Architecture, LayerDesign
from strop.extensions.megatron.families.dense import dense_architecture, dense_fields, norm_rules, outer_rules
from strop.extensions.megatron.families.rotary_frequencies import rotary_of
from strop.extensions.megatron.families.weight_rules import WeightRule, expert_rules, glu_rules


class DeepSeek:
    """DeepSeek 3, and models with its configuration (Moonlight), and DeepSeek 2 without groups of experts."""

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v2", "deepseek_v3")

    def architecture(self, hf_config: Any) -> Architecture:
        if hf_config.attention_bias or not getattr(hf_config, "rope_interleave", True):
            raise ValueError(
                f"{hf_config.model_type}: Megatron Core's latent attention here has attention_bias=false and rope_interleave=true: "
                "set policy.backend=torch"
            )
        first = hf_config.first_k_dense_replace
        layers = tuple(LayerDesign(experts=index >= first) for index in range(hf_config.num_hidden_layers))
        routed = hf_config.model_type == "deepseek_v3"
        fields = dense_fields(hf_config) | latent_fields(hf_config)
        fields |= (sigmoid_fields if routed else softmax_fields)(hf_config)
        return dense_architecture(
            hf_config,
            transformer=fields,
            layers=layers,
            rotaries=(rotary_of(hf_config, hf_config.qk_rope_head_dim),),
            latent_attention=True,
        )

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        return (
            *outer_rules(),
            *latent_rules(),
            *norm_rules(),
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
        raise ValueError("deepseek_v3: norm_topk_prob=false is not in Megatron Core's router: set policy.backend=torch")
    groups, chosen = hf_config.n_group or 1, hf_config.topk_group or 1
    fields = expert_fields(hf_config) | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    if chosen < groups:
        if hf_config.num_experts_per_tok // chosen != 2:
            raise ValueError(
                f"deepseek_v3: a group of experts is chosen by its best two here and by its best {hf_config.num_experts_per_tok // chosen} "
                f"in Megatron Core (num_experts_per_tok={hf_config.num_experts_per_tok}, topk_group={chosen}): set policy.backend=torch"
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
