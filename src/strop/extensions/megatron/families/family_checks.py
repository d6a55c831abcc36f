"""What options of ``megatron_cfg`` need that a model, or an installation, may lack: known from config.json, without Megatron Core."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from strop.extensions.megatron.families.architecture import Architecture
from strop.extensions.megatron.families.find_family import find_family
from strop.extensions.megatron.megatron_config import MegatronConfig
from strop.packages import is_installed

SECTION = "policy.megatron_cfg"


def check_architecture(config: MegatronConfig, name: str, values: Mapping[str, Any]) -> None:
    """Raise ValueError for a model whose config.json, with these ``values``, is here and has no place in Megatron Core's models."""
    family = find_family(SimpleNamespace(model_type=values.get("model_type")))
    from strop.models.loading import read_local_model_config

    architecture = family.architecture(read_local_model_config(name))
    check_recomputation(config, architecture)
    if architecture.transformer.get("num_moe_experts"):
        check_experts(config, architecture)


def check_recomputation(config: MegatronConfig, architecture: Architecture) -> None:
    """Raise ValueError for modules that the model does not have."""
    modules = config.recompute_modules or ()
    if "mla_up_proj" in modules and not architecture.latent_attention:
        raise ValueError(
            f"{SECTION}.recompute_modules: found mla_up_proj, but the model has no latent attention; take it from the list"
        )
    if "moe_act" in modules and (not is_installed("transformer_engine") or config.moe_grouped_gemm is False):
        raise ValueError(
            f"{SECTION}.recompute_modules: found moe_act, which only grouped experts of Transformer Engine recompute (it must be "
            "installed, and moe_grouped_gemm not false); take moe instead"
        )


def check_experts(config: MegatronConfig, architecture: Architecture) -> None:
    """Raise ValueError for an expert bias that the model lacks or that adapters leave alone, and for a missing dispatcher."""
    biased, asked = architecture.transformer.get("moe_router_enable_expert_bias", False), config.moe_router_enable_expert_bias
    if asked is not None and asked != biased:
        why = (
            "the model chooses its experts with the bias that its weights have, and without it chooses others"
            if biased
            else "the model's weights have no such bias: engines would choose other experts than the learner"
        )
        raise ValueError(
            f"{SECTION}.moe_router_enable_expert_bias: found {str(asked).lower()}, but {why}; set it to null, which is as the model has it"
        )
    if biased and config.moe_router_bias_update_rate and config.peft.enabled:
        raise ValueError(
            f"{SECTION}.moe_router_bias_update_rate: found {config.moe_router_bias_update_rate:g}, which changes the expert bias of the "
            f"base, and {SECTION}.peft.enabled=true trains only adapters; set it to 0"
        )
    if config.moe_token_dispatcher_type == "flex" and not is_installed("deep_ep"):
        raise ValueError(
            f"{SECTION}.moe_token_dispatcher_type: found flex, which needs DeepEP (deep_ep) and GPUs, and it is not installed; set it to "
            "alltoall, and moe_enable_deepep=false"
        )
    if config.moe_enable_deepep and config.moe_token_dispatcher_type != "flex":
        raise ValueError(
            f"{SECTION}.moe_enable_deepep: found true, but moe_token_dispatcher_type is {config.moe_token_dispatcher_type}; set that to "
            "flex, or this to false"
        )
