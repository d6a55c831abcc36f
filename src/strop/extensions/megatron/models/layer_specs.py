"""What each layer of a model is built of: Megatron Core's modules, with Strop's attention, norms and rotary embedding."""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from strop.extensions.megatron.families.architecture import Architecture, LayerDesign
from strop.extensions.megatron.models.adapted_linear import AdaptedBackend
from strop.extensions.megatron.models.latent_attention import RowLatentAttention
from strop.extensions.megatron.models.rotary_tables import rotate
from strop.extensions.megatron.models.stage_norms import NORMS
from strop.models.attention.attention_plan import AttentionSpec


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
    """Return who makes linear layers: PyTorch, or Transformer Engine where FP8, the configuration or ``grouped`` experts need it."""
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


# Linear layers followed by a norm: what attention and MLP of Gemma 2 and 3 add to the residual stream.


@cache
def with_post_norm(linear: Any, norm: Any) -> type:
    """Return ``linear``, a row-parallel layer of Megatron Core, with a ``StageNorm`` of its whole output: ``post_layernorm``."""

    class PostNormLinear(linear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
            super().__init__(input_size, output_size, config=config, **options)
            self.post_layernorm = norm(config, output_size, config.layernorm_epsilon)

        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
            output, bias = super().forward(hidden)
            return self.post_layernorm(output), bias

    return PostNormLinear


# Self-attention over a flat row: queries and keys are rotated by the positions that the row says.


class RowAttention(SelfAttention):  # type: ignore[misc]
    """Megatron Core's self-attention with one of the model's rotary embeddings."""

    def __init__(self, *arguments: Any, rotary: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rotary = rotary
        self._table: Tensor | None = None

    def forward(self, hidden_states: Tensor, attention_mask: Any, *, rotary_pos_emb: Tensor, **options: Any) -> Any:
        self._table = rotary_pos_emb[self.rotary]  # set again where the layer is recomputed, in the order of the backward passes
        return super().forward(hidden_states, attention_mask, **options)

    def get_query_key_value_tensors(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().get_query_key_value_tensors(*arguments, **options)
        assert self._table is not None
        return rotate(query, self._table), rotate(key, self._table), value


# Core attention over the tree of a row.


class TreeAttention(MegatronModule):  # type: ignore[misc]
    """Attends as the plan of a row says: query [T, 1, heads, D], key and value [T, 1, kv_heads, D] -> [T, 1, heads * D]."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        softmax_scale: float | None = None,
        *,
        window: int | None = None,
        softcap: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer, self.scale, self.window, self.softcap = layer_number - 1, softmax_scale, window, softcap

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: Any, **unused: Any
    ) -> Tensor:
        scale = self.scale if self.scale is not None else query.shape[-1] ** -0.5
        spec = AttentionSpec(self.layer, scale, self.window, self.softcap)
        attended: Tensor = packed_seq_params.plan.attend(query.squeeze(1), key.squeeze(1), value.squeeze(1), spec)
        return attended.flatten(1).unsqueeze(1)

    def sharded_state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        return {}
