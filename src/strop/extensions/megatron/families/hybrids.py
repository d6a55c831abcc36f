"""Families with recurrent layers: Qwen3-Next and Qwen3.5 (gated delta nets), Nemotron-H (Mamba 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from strop.extensions.megatron.families.architecture import (
    Architecture,
    DeltaNetSizes,
    LayerDesign,
    MambaSizes,
    PartsOrder,
    WeightRule,
    activation,
    attention_rules,
    dense_architecture,
    dense_fields,
    expert_rules,
    glu_rules,
    head_size,
    norm_rules,
    outer_rules,
)
from strop.extensions.megatron.families.decoders import check_unbiased, has_experts, sigmoid_fields

DELTA, MIXER = "layers.linear_attn.", "layers.mixer."
ATTENTION, MLP = "layers.self_attention.", "layers.mlp."


class QwenHybrid:
    """Qwen3-Next and the text models of Qwen3.5: gated delta nets, and attention whose outputs have gates."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")

    def architecture(self, hf_config: Any) -> Architecture:
        check_unbiased(hf_config, "attention_bias")
        if hf_config.hidden_act != "silu":
            raise ValueError(f"{hf_config.model_type}: hidden_act={hf_config.hidden_act}: set policy.backend=torch")
        # Qwen3.5's dense models have no experts, and its mixtures have them in each layer.
        experts = getattr(hf_config, "num_experts", 0)
        fields = dense_fields(hf_config) | {"qk_layernorm": True, "attention_output_gate": True}
        if experts:
            fields |= {
                "num_moe_experts": experts,
                "moe_router_topk": hf_config.num_experts_per_tok,
                "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
                "moe_router_pre_softmax": not getattr(hf_config, "norm_topk_prob", True),
                "moe_shared_expert_intermediate_size": hf_config.shared_expert_intermediate_size,
                "moe_shared_expert_gate": True,
            }
        layers = tuple(
            LayerDesign(
                mixer="attention" if kind == "full_attention" else "delta_net",
                experts=experts > 0 and (not hasattr(hf_config, "mlp_only_layers") or has_experts(hf_config, index)),
            )
            for index, kind in enumerate(hf_config.layer_types)
        )
        return dense_architecture(
            hf_config, transformer=fields, layers=layers, norm="rms_plus_one", recurrent=delta_net_sizes(hf_config)
        )

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        return (
            *outer_rules(),
            *attention_rules(hf_config, gated=True),
            *delta_net_rules(delta_net_sizes(hf_config)),
            *norm_rules(),
            *glu_rules("mlp.", "mlp."),
            *glu_rules("mlp.shared_expert.", "mlp.shared_experts."),
            WeightRule("layers.mlp.shared_expert_gate.weight", f"{MLP}shared_experts.gate_weight"),
            WeightRule("layers.mlp.gate.weight", f"{MLP}router.weight"),
            *expert_rules("gate_proj", "up_proj", "down_proj"),
        )


def delta_net_sizes(hf_config: Any) -> DeltaNetSizes:
    return DeltaNetSizes(
        key_heads=hf_config.linear_num_key_heads,
        value_heads=hf_config.linear_num_value_heads,
        key_size=hf_config.linear_key_head_dim,
        value_size=hf_config.linear_value_head_dim,
        kernel=hf_config.linear_conv_kernel_dim,
    )


def delta_net_rules(sizes: DeltaNetSizes) -> Sequence[WeightRule]:
    """Return the rules of gated delta nets, whose projections Qwen3-Next has by key heads and Qwen3.5 one after another."""
    weights: dict[str, tuple[tuple[int, ...], int]] = {
        "in_proj_qkvz": ((0, 1, 2, 3), sizes.key_heads),
        "in_proj_ba": ((4, 5), sizes.key_heads),
        "in_proj_qkv": ((0, 1, 2), 1),
        "in_proj_z": ((3,), 1),
        "in_proj_b": ((4,), 1),
        "in_proj_a": ((5,), 1),
    }
    return (
        *(
            WeightRule(f"{DELTA}{name}.weight", f"{ATTENTION}in_proj.weight", 0, PartsOrder(sizes.parts, parts, blocks))
            for name, (parts, blocks) in weights.items()
        ),
        WeightRule(f"{DELTA}conv1d.weight", f"{ATTENTION}conv1d.weight", 0, PartsOrder(sizes.convolved, (0, 1, 2))),
        WeightRule(f"{DELTA}A_log", f"{ATTENTION}A_log", 0),
        WeightRule(f"{DELTA}dt_bias", f"{ATTENTION}dt_bias", 0),
        WeightRule(f"{DELTA}norm.weight", f"{ATTENTION}out_norm.weight"),
        WeightRule(f"{DELTA}out_proj.weight", f"{ATTENTION}out_proj.weight", 1),
    )


class NemotronHybrid:
    """Nemotron-H and Nemotron 3: layers are a Mamba 2 layer, attention without positions, an MLP, or experts."""

    model_types: ClassVar[tuple[str, ...]] = ("nemotron_h",)

    def architecture(self, hf_config: Any) -> Architecture:
        check_unbiased(hf_config, "attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias")
        if hf_config.mamba_hidden_act != "silu":
            raise ValueError(f"nemotron_h: mamba_hidden_act={hf_config.mamba_hidden_act}: set policy.backend=torch")
        kinds = hf_config.layer_types
        fields: dict[str, Any] = {
            "hidden_size": hf_config.hidden_size,
            "num_attention_heads": hf_config.num_attention_heads,
            "num_query_groups": hf_config.num_key_value_heads,
            "kv_channels": head_size(hf_config),
            "ffn_hidden_size": hf_config.intermediate_size,
            "gated_linear_unit": False,
            "activation_func": activation(hf_config, hf_config.mlp_hidden_act),
            "normalization": "RMSNorm",
            "layernorm_epsilon": hf_config.layer_norm_epsilon,
            "add_bias_linear": False,
        }
        if "moe" in kinds:
            fields |= sigmoid_fields(hf_config) | {
                "moe_shared_expert_intermediate_size": hf_config.moe_shared_expert_intermediate_size,
                "moe_latent_size": hf_config.moe_latent_size,
            }
        mixers: dict[str, Any] = {"linear_attention": "mamba", "full_attention": "attention"}
        layers = tuple(
            LayerDesign(rotary=None, mixer=mixers.get(kind), mlp=kind not in mixers, experts=kind == "moe") for kind in kinds
        )
        return dense_architecture(
            hf_config,
            transformer=fields,
            layers=layers,
            rotaries=(),
            padding_token=None,  # Transformers trains the embeddings of all tokens here
            norm="rms_wide",
            recurrent=mamba_sizes(hf_config),
        )

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        norms = [
            WeightRule(f"model.layers.{layer}.norm.weight", f"layers.{norm}.weight")
            for layer, kind in enumerate(hf_config.layer_types)
            for norm in ["pre_mlp_layernorm" if kind in ("mlp", "moe") else "input_layernorm"]
        ]
        local = f"{MLP}experts.local_experts.{{expert}}"
        names = {"up_proj": ("linear_fc1", 0), "down_proj": ("linear_fc2", 1)}
        experts = [
            WeightRule(
                f"{MIXER}experts.{name}",
                f"{local}.{linear}.weight",
                dim,
                expert_files=(f"backbone.{MIXER}experts.{{expert}}.{name}.weight",),
            )
            for name, (linear, dim) in names.items()
        ]
        linears = [
            WeightRule(f"{MIXER}{module}{name}.weight", f"{MLP}{parameter}{linear}.weight", dim)
            for module, parameter in (("", ""), ("shared_experts.", "shared_experts."))
            for name, (linear, dim) in names.items()
        ]
        rules = (
            *outer_rules(embedding="model.embeddings.weight", norm="model.norm_f"),
            *norms,
            *attention_rules(hf_config, module=MIXER),
            *mamba_rules(mamba_sizes(hf_config)),
            *linears,
            *experts,
            WeightRule(f"{MIXER}fc1_latent_proj.weight", f"{MLP}fc1_latent_proj.weight"),
            WeightRule(f"{MIXER}fc2_latent_proj.weight", f"{MLP}fc2_latent_proj.weight"),
            WeightRule(f"{MIXER}gate.weight", f"{MLP}router.weight"),
            WeightRule(f"{MIXER}gate.e_score_correction_bias", f"{MLP}router.expert_bias", dtype=torch.float32),
        )
        return [replace(rule, aliases=(f"backbone.{rule.name.removeprefix('model.')}",)) for rule in rules]


def mamba_sizes(hf_config: Any) -> MambaSizes:
    return MambaSizes(
        inner_heads=hf_config.mamba_num_heads,
        head_size=hf_config.mamba_head_dim,
        groups=hf_config.n_groups,
        state_size=hf_config.ssm_state_size,
        kernel=hf_config.conv_kernel,
        conv_bias=hf_config.use_conv_bias,
        step_limit=(hf_config.time_step_min, float("inf")),  # as Transformers has it
    )


def mamba_rules(sizes: MambaSizes) -> Sequence[WeightRule]:
    parts, channels = PartsOrder(sizes.parts, (0, 1, 2, 3, 4)), PartsOrder(sizes.convolved, (0, 1, 2))
    return (
        WeightRule(f"{MIXER}in_proj.weight", f"{ATTENTION}in_proj.weight", 0, parts),
        WeightRule(f"{MIXER}conv1d.weight", f"{ATTENTION}conv1d.weight", 0, channels),
        WeightRule(f"{MIXER}conv1d.bias", f"{ATTENTION}conv1d.bias", 0, channels),
        *(WeightRule(f"{MIXER}{name}", f"{ATTENTION}{name}", 0) for name in ("A_log", "D", "dt_bias", "norm.weight")),
        WeightRule(f"{MIXER}out_proj.weight", f"{ATTENTION}out_proj.weight", 1),
    )
