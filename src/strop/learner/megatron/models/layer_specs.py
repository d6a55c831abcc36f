"""What each layer of a model is built of: Megatron Core's modules, with Strop's attention, norms and rotary embedding."""

from __future__ import annotations

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from strop.learner.megatron.families.architecture import Architecture, LayerDesign
from strop.learner.megatron.models.adapted_linear import AdaptedBackend
from strop.learner.megatron.models.latent_attention import RowLatentAttention
from strop.learner.megatron.models.post_norm import with_post_norm
from strop.learner.megatron.models.row_attention import RowAttention
from strop.learner.megatron.models.stage_norms import NORMS
from strop.learner.megatron.models.tree_attention import TreeAttention


def layer_spec(architecture: Architecture, design: LayerDesign, config: Any, *, adapters: bool = False) -> ModuleSpec:
    """Return the spec of a layer. ``adapters``: its linear layers have room for them."""
    backend = AdaptedBackend(choose_backend(config)) if adapters else choose_backend(config)
    norm: Any = NORMS[architecture.norm]
    row_linear = backend.row_parallel_linear()
    if architecture.post_norms:
        row_linear = with_post_norm(row_linear, norm)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=_attention(architecture, design, config, backend, row_linear),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=_experts(config, adapters=adapters) if design.experts else _mlp(backend, row_linear),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def choose_backend(config: Any, *, grouped: bool = False) -> Any:
    """Return who makes linear layers: PyTorch, or Transformer Engine where FP8, the configuration or ``grouped`` experts ask for it."""
    if config.transformer_impl != "transformer_engine" and not grouped:
        return LocalSpecProvider()
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def _attention(architecture: Architecture, design: LayerDesign, config: Any, backend: Any, row_linear: Any) -> ModuleSpec:
    core = ModuleSpec(module=TreeAttention, params={"window": design.window, "softcap": architecture.softcap})
    params = {"attn_mask_type": AttnMaskType.causal, "rotary": design.rotary}
    norm = NORMS[architecture.norm]
    column_linear = backend.column_parallel_linear()
    if architecture.latent_attention:
        down_linear = choose_backend(config).column_parallel_linear()  # Megatron Core takes only its own classes for them
        latent = MLASelfAttentionSubmodules(
            linear_q_proj=column_linear,
            linear_q_down_proj=down_linear,
            linear_q_up_proj=column_linear,
            linear_kv_down_proj=down_linear,
            linear_kv_up_proj=column_linear,
            core_attention=core,
            linear_proj=row_linear,
            q_layernorm=norm,
            kv_layernorm=norm,
        )
        return ModuleSpec(module=RowLatentAttention, params=params, submodules=latent)
    submodules = SelfAttentionSubmodules(
        linear_qkv=column_linear,
        core_attention=core,
        linear_proj=row_linear,
        q_layernorm=norm if config.qk_layernorm else IdentityOp,
        k_layernorm=norm if config.qk_layernorm else IdentityOp,
    )
    return ModuleSpec(module=RowAttention, params=params, submodules=submodules)


def _mlp(backend: Any, row_linear: Any) -> ModuleSpec:
    submodules = MLPSubmodules(linear_fc1=backend.column_parallel_linear(), linear_fc2=row_linear)
    return ModuleSpec(module=MLP, submodules=submodules)


def _experts(config: Any, *, adapters: bool) -> ModuleSpec:
    grouped = config.moe_grouped_gemm  # Megatron Core's own grouped experts without Transformer Engine have other weights
    backend = choose_backend(config, grouped=grouped)
    return get_moe_module_spec_for_backend(
        backend=AdaptedBackend(backend) if adapters else backend, num_experts=config.num_moe_experts, moe_grouped_gemm=grouped
    )
