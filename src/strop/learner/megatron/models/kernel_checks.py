"""What an option of ``megatron_cfg`` needs that a model, a GPU or an installation may lack."""

from __future__ import annotations

import contextlib
import logging
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.tensor_parallel import random

from strop.learner.megatron.families.architecture import Architecture
from strop.learner.megatron.megatron_config import Fp8Config, MegatronConfig

logger = logging.getLogger(__name__)
SECTION = "policy.megatron_cfg"
FP8_GPUS = {  # recipe -> (least compute capability, its GPUs)
    "tensorwise": ((8, 9), "Ada, Hopper or newer"),
    "delayed": ((8, 9), "Ada, Hopper or newer"),
    "blockwise": ((9, 0), "Hopper or newer"),
    "mxfp8": ((10, 0), "Blackwell or newer"),
}


class NoFp8:
    """Stands for Transformer Engine's state of FP8 where it is not installed: Megatron Core 0.16.1 asks for it all the same."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


if not random.HAVE_TE:  # recomputed norms and latent attention end with a NameError otherwise
    random.FP8GlobalStateManager = NoFp8
    random.activation_recompute_forward = random.fp8_autocast = lambda **options: contextlib.nullcontext()


def check_fp8(fp8: Fp8Config, capability: tuple[int, int]) -> None:
    """Raise RuntimeError if a GPU of this compute capability has no kernels for the recipe."""
    least, gpus = FP8_GPUS[fp8.fp8_recipe]
    if capability < least:
        others = [name for name, (needed, _) in FP8_GPUS.items() if needed <= capability]
        fix = f"set it to {' or '.join(others)}" if others else f"set {SECTION}.fp8_cfg.enabled=false"
        raise RuntimeError(
            f"{SECTION}.fp8_cfg.fp8_recipe: found {fp8.fp8_recipe}, which needs {gpus}, and this GPU has compute capability "
            f"{capability[0]}.{capability[1]}; {fix}"
        )


def check_recomputation(config: MegatronConfig, architecture: Architecture) -> None:
    """Raise ValueError for modules that the model does not have."""
    modules = config.recompute_modules or ()
    if "mla_up_proj" in modules and not architecture.latent_attention:
        raise ValueError(
            f"{SECTION}.recompute_modules: found mla_up_proj, but the model has no latent attention; take it from the list"
        )
    if "moe_act" in modules and (find_spec("transformer_engine") is None or config.moe_grouped_gemm is False):
        raise ValueError(
            f"{SECTION}.recompute_modules: found moe_act, which only grouped experts of Transformer Engine recompute (it must be "
            "installed, and moe_grouped_gemm not false); take moe instead"
        )


def check_experts(config: MegatronConfig, architecture: Architecture) -> None:
    """Raise ValueError for an expert bias that the model lacks or that adapters leave alone, RuntimeError for a missing dispatcher."""
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
            f"base, and {SECTION}.peft.enabled=true trains adapters alone; set it to 0"
        )
    if config.moe_token_dispatcher_type == "flex" and find_spec("deep_ep") is None:
        raise RuntimeError(
            f"{SECTION}.moe_token_dispatcher_type: found flex, which needs DeepEP (deep_ep) and GPUs, and it is not installed; set it to "
            "alltoall, and moe_enable_deepep=false"
        )
    if config.moe_enable_deepep and config.moe_token_dispatcher_type != "flex":
        raise ValueError(
            f"{SECTION}.moe_enable_deepep: found true, but moe_token_dispatcher_type is {config.moe_token_dispatcher_type}; set that to "
            "flex, or this to false"
        )


def choose_grouped_gemm(config: MegatronConfig, dtype: torch.dtype, *, installed: bool) -> bool:
    """Return whether Transformer Engine computes the experts of a rank by grouped kernels. ``installed``: whether it is here."""
    asked: Any = config.moe_grouped_gemm
    if not installed or dtype == torch.float64:
        if asked:
            logger.warning(
                "%s.moe_grouped_gemm is true, but %s; the experts of a rank are computed one after the other, with the same numbers",
                SECTION,
                "float64 has no grouped kernels" if installed else "Transformer Engine is not installed",
            )
        return False
    return bool(asked) if asked is not None else config.transformer_impl != "local"
