"""Build the stages of a model that this rank holds, from Megatron Core's TransformerConfig with the options of ``megatron_cfg``."""

from __future__ import annotations

import contextlib
import logging
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from strop.extensions.megatron.families.architecture import Architecture
from strop.extensions.megatron.families.find_family import (
    check_experts,
    check_indexers,
    check_recomputation,
    check_recurrent,
    find_family,
)
from strop.extensions.megatron.layout import MegatronLayout
from strop.extensions.megatron.megatron_config import Fp8Config, MegatronConfig
from strop.extensions.megatron.models.gpt_stage import GptStage, Head
from strop.extensions.megatron.models.layer_specs import layer_spec
from strop.extensions.megatron.models.stage_norms import NORMS

logger = logging.getLogger(__name__)
SECTION = "policy.megatron_cfg"
FP8_GPUS = {  # recipe -> (least compute capability, its GPUs)
    "tensorwise": ((8, 9), "Ada, Hopper or newer"),
    "delayed": ((8, 9), "Ada, Hopper or newer"),
    "blockwise": ((9, 0), "Hopper or newer"),
    "mxfp8": ((10, 0), "Blackwell or newer"),
}


class NoFp8:
    """Stands for Transformer Engine's state of FP8 where it is not installed: Megatron Core 0.16.1 reads it anyway."""

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


def choose_grouped_gemm(config: MegatronConfig, dtype: torch.dtype, *, installed: bool) -> bool:
    """Return whether Transformer Engine computes the experts of a rank by grouped kernels. ``installed``: whether it is here."""
    asked: Any = config.moe_grouped_gemm
    if not installed or dtype == torch.float64:
        if asked:
            logger.warning(
                "%s.moe_grouped_gemm is true, but %s; the experts of a rank are computed one after another, with the same numbers",
                SECTION,
                "float64 has no grouped kernels" if installed else "Transformer Engine is not installed",
            )
        return False
    return bool(asked) if asked is not None else config.transformer_impl != "local"


def transformer_config(architecture: Architecture, config: MegatronConfig, dtype: torch.dtype) -> Any:
    """Return the configuration of the model's layers, whose weights have the data type ``dtype``."""
    check_recomputation(config, architecture)
    check_recurrent(config, architecture)
    check_indexers(config, architecture)
    kind = MLATransformerConfig if architecture.latent_attention else TransformerConfig
    fields: dict[str, Any] = {
        **architecture.transformer,
        **_common_fields(dtype),
        **_parallel_fields(config),
        **_recompute_fields(config),
        **_kernel_fields(config),
        **(_expert_fields(config, architecture, dtype) if architecture.transformer.get("num_moe_experts") else {}),
        **config.model_overrides,
    }
    if config.layernorm_epsilon is not None:
        fields["layernorm_epsilon"] = config.layernorm_epsilon
    return kind(num_layers=architecture.num_layers, **fields)


def _common_fields(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "calculate_per_token_loss": True,  # ranks add gradients: a loss divides by the totals of the optimizer step itself
        "variable_seq_lengths": True,
        "deterministic_mode": torch.are_deterministic_algorithms_enabled(),
        "moe_token_dispatcher_type": "alltoall",  # of dense models too: variable lengths refuse the default
        # Weights are read from files. But the initialization must run: it sets the attributes by which the gradient's norm knows what is
        # divided over tensor-parallel ranks, and a norm without them is wrong by a third.
        "perform_initialization": True,
        "init_method": set_zero,
        "output_layer_init_method": set_zero,
        "embedding_init_method": set_zero,
        "use_cpu_initialization": False,  # it makes whole matrices on every rank
        "persist_layer_norm": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "transformer_impl": "local",
    }


def set_zero(weight: Tensor) -> Tensor:
    """Initialize a weight that is read from a file: zeros, so that padded rows of the vocabulary are."""
    with torch.no_grad():
        return weight.zero_()


def _parallel_fields(config: MegatronConfig) -> dict[str, Any]:
    virtual = config.virtual_pipeline_model_parallel_size or 1
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "sequence_parallel": config.sequence_parallel and config.tensor_model_parallel_size > 1,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
        "context_parallel_size": config.context_parallel_size,
        "expert_model_parallel_size": config.expert_model_parallel_size,
        "expert_tensor_parallel_size": config.expert_tensor_parallel_size,
        "num_layers_in_first_pipeline_stage": config.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": config.num_layers_in_last_pipeline_stage,
    }
    if virtual > 1:
        # With two stages, two messages pass between the same two ranks at once, and batched ones are matched by order: silently wrong.
        fields |= {"virtual_pipeline_model_parallel_size": virtual, "overlap_p2p_comm": True, "batch_p2p_comm": False}
    return fields


def _recompute_fields(config: MegatronConfig) -> dict[str, Any]:
    if not config.activation_checkpointing:
        return {}
    if config.recompute_granularity == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    modules = config.recompute_modules
    return {"recompute_granularity": "selective", "recompute_modules": list(modules) if modules else None}


def _kernel_fields(config: MegatronConfig) -> dict[str, Any]:
    """Return what needs Transformer Engine. Where it is not installed, what only saves time is left out."""
    fp8 = config.fp8_cfg
    wants_engine = config.transformer_impl == "transformer_engine" or (config.transformer_impl == "auto" and fp8.enabled)
    if wants_engine and not HAVE_TE:
        key = "megatron_cfg.fp8_cfg.enabled" if fp8.enabled else "megatron_cfg.transformer_impl=transformer_engine"
        raise RuntimeError(
            f"policy.{key} needs Transformer Engine, which is not installed here or has no GPU; install it, or set "
            "policy.megatron_cfg.fp8_cfg.enabled=false and policy.megatron_cfg.transformer_impl=local"
        )
    if config.gradient_accumulation_fusion and find_spec("fused_weight_gradient_mlp_cuda") is None:
        raise RuntimeError(
            "policy.megatron_cfg.gradient_accumulation_fusion=true needs APEX's CUDA extension fused_weight_gradient_mlp_cuda, which is "
            "not installed; install it, or set the key to false"
        )
    fields: dict[str, Any] = {
        "gradient_accumulation_fusion": config.gradient_accumulation_fusion,
        "bias_activation_fusion": False,  # its kernels know neither every activation of the families nor their data types
        "apply_rope_fusion": False,  # positions are those of the row
    }
    if wants_engine:
        fields["transformer_impl"] = "transformer_engine"
    if fp8.enabled:
        check_fp8(fp8, torch.cuda.get_device_capability())
        fields |= {"fp8": fp8.fp8, "fp8_recipe": fp8.fp8_recipe}
        fields |= {
            "first_last_layers_bf16": config.first_last_layers_bf16,
            "num_layers_at_start_in_bf16": config.num_layers_at_start_in_bf16,
            "num_layers_at_end_in_bf16": config.num_layers_at_end_in_bf16,
        }
    return fields


def _expert_fields(config: MegatronConfig, architecture: Architecture, dtype: torch.dtype) -> dict[str, Any]:
    check_experts(config, architecture)
    balancing = config.moe_router_load_balancing_type if config.moe_aux_loss_coeff else "none"
    pattern = [int(design.experts) for design in architecture.layers]
    return {
        "moe_layer_freq": pattern if 0 in pattern else 1,  # checkpoints name the layers of one pattern together
        "moe_router_load_balancing_type": balancing,
        "moe_aux_loss_coeff": config.moe_aux_loss_coeff,
        "moe_z_loss_coeff": config.moe_z_loss_coeff,
        "moe_router_dtype": config.moe_router_dtype,
        "moe_router_bias_update_rate": config.moe_router_bias_update_rate,
        "moe_token_dispatcher_type": config.moe_token_dispatcher_type,
        "moe_enable_deepep": config.moe_enable_deepep,
        "moe_shared_expert_overlap": config.moe_shared_expert_overlap,
        "moe_permute_fusion": config.moe_permute_fusion and HAVE_TE,
        "moe_grouped_gemm": choose_grouped_gemm(config, dtype, installed=HAVE_TE),
        "use_fused_weighted_squared_relu": config.use_fused_weighted_squared_relu and HAVE_TE,
    }


def build_stages(
    hf_config: Any, config: MegatronConfig, layout: MegatronLayout, *, dtype: torch.dtype, head: Head = "lm"
) -> list[GptStage]:
    """Build the stages of this rank, one for each virtual stage, without weights. ``head``: for logits, or for values (``scalar``)."""
    architecture = find_family(hf_config).architecture(hf_config)
    settings = transformer_config(architecture, config, dtype)
    vocab_size = padded_vocabulary(architecture.vocab_size, config.tensor_model_parallel_size)
    virtual = settings.virtual_pipeline_model_parallel_size
    with layout.activate():
        stages = []
        for stage in range(virtual or 1):
            vp_stage = stage if virtual else None
            first = get_transformer_layer_offset(settings, vp_stage=vp_stage)
            designs = architecture.layers[first : first + get_num_layers_to_build(settings, vp_stage=vp_stage)]
            block = TransformerBlockSubmodules(
                layer_specs=[layer_spec(architecture, design, settings, adapters=config.peft.enabled) for design in designs],
                layer_norm=NORMS[architecture.norm],
            )
            stages.append(
                GptStage(
                    settings,
                    architecture,
                    block,
                    vocab_size=vocab_size,
                    head=head,
                    pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                    post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                    vp_stage=vp_stage,
                )
            )
    return stages


def padded_vocabulary(vocab_size: int, tensor_parallel: int) -> int:
    """Return the rows of an embedding that tensor-parallel ranks share equally."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel
