"""What each layer of a model is built of: Megatron Core's modules, with Strop's attention, norms and rotary embedding."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from strop.extensions.megatron.families.architecture import Architecture, IndexerSizes, LayerDesign
from strop.extensions.megatron.models.adapted_linear import AdaptedBackend
from strop.extensions.megatron.models.gpt_stage import rotate
from strop.extensions.megatron.models.recurrent_layers import GatedDeltaNet, Mamba2, divide_rows
from strop.extensions.megatron.models.stage_norms import NORMS
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.mixers.indexers import IndexRows
from strop.sampling import at_least_float32

multi_latent_attention.HAVE_TE = HAVE_TE  # 0.16.1 asks for its classes without it: isinstance of None


class WholeLinear(nn.Module):
    """A linear layer that every tensor-parallel rank has whole, in place of Transformer Engine's: [.., inputs] -> [.., outputs].

    Projections before and after routed experts, which read a rank's own tokens.
    """

    def __init__(self, inputs: int, outputs: int, *, config: Any, **unused: Any) -> None:
        super().__init__()
        empty = torch.zeros(outputs, inputs, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = nn.Parameter(empty)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return F.linear(hidden, self.weight), None


if not HAVE_TE:
    moe_layer.HAVE_TE, moe_layer.TELinear = True, WholeLinear  # it has no others for moe_latent_size

LATENT_EPSILON = 1e-6  # of the norms of compressed inputs, whatever the configuration says of the others


class RowLatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron Core's latent attention whose queries and keys are made for a row: its own takes the positions 0 to T - 1.

    Its own also leaves the gradient of the keys' rotated part, which all heads share, on each tensor-parallel rank separately.
    """

    def __init__(
        self, *arguments: Any, rotary: int, sizes: IndexerSizes | None = None, chooser: int | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.rotary = rotary
        self.indexer: Indexer | None = None
        if sizes is not None and chooser == self.layer_number - 1:  # other layers share the choice of one before them
            self.indexer = Indexer(self.config, sizes, self.layer_number - 1)
        self._row: Any = None
        self.kv_layernorm.eps = LATENT_EPSILON
        if self.config.q_lora_rank is not None:
            self.q_layernorm.eps = LATENT_EPSILON
        self._table: Tensor | None = None

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Take the norms of the spec. Since 0.19 they are refused without ``qk_layernorm``, with which their gradients are added once too
        often without sequence parallelism."""
        return dict(vars(submodules))

    def forward(self, hidden_states: Tensor, attention_mask: Any, *, rotary_pos_emb: Tensor, **options: Any) -> Any:
        self._table, self._row = rotary_pos_emb[self.rotary], options["packed_seq_params"]
        for unused in ("rotary_pos_cos", "rotary_pos_sin", "rotary_pos_cos_sin"):
            options.pop(unused, None)
        return super().forward(hidden_states, attention_mask, **options)

    def get_query_key_value_tensors(self, hidden_states: Tensor, *unused: Any, **options: Any) -> tuple[Tensor, ...]:
        """Return queries and keys [T, 1, heads, qk size], values [T, 1, heads, v size], and the two compressed inputs."""
        config, table = self.config, self._table
        compressed_query = self._compress_query(hidden_states)
        if self.indexer is not None:
            tokens = [hidden_states, compressed_query]
            if config.sequence_parallel:
                tokens = [gather_from_sequence_parallel_region(each.detach(), group=self.tp_group) for each in tokens]
            assert table is not None
            self.indexer(*tokens, table, self._row)
        compressed = self._gather_columns(self.linear_kv_down_proj(hidden_states)[0])  # [T, 1, rank + turned size]
        compressed, key_turned = compressed.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], -1)
        key_turned = copy_to_tensor_model_parallel_region(key_turned, group=self.tp_group)  # every rank's heads have it
        compressed = self.kv_layernorm(self._scatter_tokens(compressed))

        assert table is not None
        expand: Any = partial(self._expand, table)  # other rows may be under way before it is computed again
        if self.recompute_up_proj:
            self.qkv_up_checkpoint = CheckpointWithoutOutput(fp8=config.fp8)
            expand = partial(self.qkv_up_checkpoint.checkpoint, expand)
        query, key, value = expand(compressed_query, compressed, key_turned)
        return query, key, value, compressed_query, compressed

    def _compress_query(self, hidden: Tensor) -> Tensor:
        if self.config.q_lora_rank is None:
            return hidden
        compressed = self._gather_columns(self.linear_q_down_proj(hidden)[0])
        normed: Tensor = self.q_layernorm(self._scatter_tokens(compressed))
        return normed

    def _expand(self, table: Tensor, compressed_query: Tensor, compressed: Tensor, key_turned: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values [T, 1, heads, ...] of compressed inputs, rotated."""
        config, heads = self.config, self.num_attention_heads_per_partition
        up = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query = up(compressed_query)[0].unflatten(-1, (heads, config.qk_head_dim + config.qk_pos_emb_head_dim))
        query, query_turned = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
        key_value = self.linear_kv_up_proj(compressed)[0].unflatten(-1, (heads, -1))
        key, value = key_value.split([config.qk_head_dim, config.v_head_dim], -1)
        query_turned, key_turned = _rotate(query_turned, table), _rotate(key_turned.unsqueeze(2), table)
        key_turned = key_turned.expand(-1, -1, heads, -1)
        return torch.cat((query, query_turned), -1), torch.cat((key, key_turned), -1), value

    def _gather_columns(self, part: Tensor) -> Tensor:
        whole: Tensor = gather_from_tensor_model_parallel_region(part, group=self.tp_group)
        return whole

    def _scatter_tokens(self, whole: Tensor) -> Tensor:
        return scatter_to_sequence_parallel_region(whole, group=self.tp_group) if self.config.sequence_parallel else whole


class Indexer(nn.Module):
    """Chooses the tokens of its path that each token attends to, for its layer and those that share its choice.

    It is not trained, as in Transformers: no gradient passes through a choice. Every tensor-parallel rank has it whole, and all tokens.
    """

    def __init__(self, config: Any, sizes: IndexerSizes, layer: int) -> None:
        super().__init__()
        self.sizes, self.layer = sizes, layer
        self.wq_b = WholeLinear(config.q_lora_rank, sizes.heads * sizes.head_size, config=config)
        self.wk = WholeLinear(config.hidden_size, sizes.head_size, config=config)
        kind: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.k_norm = nn.LayerNorm(sizes.head_size, eps=1e-6, **kind)
        self.weights_proj = WholeLinear(config.hidden_size, sizes.heads, config=config)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, hidden: Tensor, compressed_query: Tensor, table: Tensor, row: Any) -> None:
        query = self.wq_b(compressed_query)[0].unflatten(-1, (self.sizes.heads, -1))  # [T, 1, heads, D]
        key = self.k_norm(self.wk(hidden)[0]).unsqueeze(2)
        size = table.shape[-1]
        turned = (self._turn(each[..., :size], table) for each in (query, key))
        query, key = (
            at_least_float32(torch.cat((each, other[..., size:]), -1)) for each, other in zip(turned, (query, key), strict=True)
        )
        weight = at_least_float32(self.weights_proj(hidden)[0])
        chosen = row.plan.choose(IndexRows(query[:, 0], key[:, 0, 0], weight[:, 0], self.sizes.count), self.layer)
        if chosen.shape[-1]:  # otherwise no path has more tokens than are chosen
            row.chosen[self.layer] = chosen

    def _turn(self, heads: Tensor, table: Tensor) -> Tensor:
        return _rotate(heads, table) if self.sizes.interleaved else rotate(heads, table)


def _rotate(heads: Tensor, table: Tensor) -> Tensor:
    """Rotate pairs of neighbours, [T, 1, heads, D]: they are first separated into halves."""
    return rotate(torch.cat((heads[..., 0::2], heads[..., 1::2]), -1), table)


def layer_spec(architecture: Architecture, design: LayerDesign, config: Any, *, adapters: bool = False) -> ModuleSpec:
    """Return the spec of a layer. ``adapters``: its linear layers have room for them."""
    backend = AdaptedBackend(choose_backend(config)) if adapters else choose_backend(config)
    norm: Any = NORMS[architecture.norm]
    row_linear = backend.row_parallel_linear()
    if architecture.post_norms:
        row_linear = with_post_norm(row_linear, norm)
    mixes, feeds = design.mixer is not None, design.mlp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm if mixes else IdentityOp,
            self_attention=_mixer(architecture, design, config, backend, row_linear) if mixes else IdentityOp,
            self_attn_bda=get_bias_dropout_add if mixes else IdentityFuncOp,
            pre_mlp_layernorm=norm if feeds else IdentityOp,
            mlp=_feed_forward(design, config, backend, row_linear, adapters=adapters) if feeds else IdentityOp,
            mlp_bda=get_bias_dropout_add if feeds else IdentityFuncOp,
        ),
    )


def choose_backend(config: Any, *, grouped: bool = False) -> Any:
    """Return who makes linear layers: PyTorch, or Transformer Engine where FP8, the configuration or ``grouped`` experts need it."""
    if config.transformer_impl != "transformer_engine" and not grouped:
        return LocalSpecProvider()
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def _mixer(architecture: Architecture, design: LayerDesign, config: Any, backend: Any, row_linear: Any) -> ModuleSpec:
    if design.mixer == "attention":
        return _attention(architecture, design, config, backend, row_linear)
    module = GatedDeltaNet if design.mixer == "delta_net" else Mamba2
    return ModuleSpec(module=module, params={"sizes": architecture.recurrent, "backend": backend})


def _attention(architecture: Architecture, design: LayerDesign, config: Any, backend: Any, row_linear: Any) -> ModuleSpec:
    options = {"window": design.window, "softcap": architecture.softcap, "sinks": architecture.sinks, "chooser": design.chooser}
    core = ModuleSpec(module=TreeAttention, params=options)
    params: dict[str, Any] = {"attn_mask_type": AttnMaskType.causal, "rotary": design.rotary}
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
        params |= {"sizes": architecture.indexer, "chooser": design.chooser}
        return ModuleSpec(module=RowLatentAttention, params=params, submodules=latent)
    submodules = SelfAttentionSubmodules(
        linear_qkv=column_linear,
        core_attention=core,
        linear_proj=row_linear,
        q_layernorm=norm if config.qk_layernorm else IdentityOp,
        k_layernorm=norm if config.qk_layernorm else IdentityOp,
    )
    return ModuleSpec(module=RowAttention, params=params, submodules=submodules)


def _feed_forward(design: LayerDesign, config: Any, backend: Any, row_linear: Any, *, adapters: bool) -> Any:
    if design.experts:
        return _experts(config, adapters=adapters)
    submodules = MLPSubmodules(linear_fc1=backend.column_parallel_linear(), linear_fc2=row_linear)
    if hasattr(MLP, "as_mlp_submodule"):  # since 0.19, which warns of a spec in each layer
        return partial(MLP.as_mlp_submodule, submodules=submodules)
    return ModuleSpec(module=MLP, submodules=submodules)


def _experts(config: Any, *, adapters: bool) -> ModuleSpec:
    grouped = config.moe_grouped_gemm  # Megatron Core's own grouped experts without Transformer Engine have other weights
    backend = choose_backend(config, grouped=grouped)
    if config.add_bias_linear and isinstance(backend, LocalSpecProvider):
        backend = BiasedExperts()
    return get_moe_module_spec_for_backend(
        backend=AdaptedBackend(backend) if adapters else backend, num_experts=config.num_moe_experts, moe_grouped_gemm=grouped
    )


class ExpertRowLinear(RowParallelLinear):  # type: ignore[misc]
    """The last linear layer of an expert, with a bias.

    Megatron Core takes the bias for one that all tensor-parallel ranks have, which have other experts: it would add its gradients, and
    count that of one rank in the norm. And it adds the bias to the output in place, which PyTorch refuses of a function's own input.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.bias.sequence_parallel = False
        divide_rows(self.bias)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(hidden)
        return output.clone(), bias


class BiasedExperts(LocalSpecProvider):  # type: ignore[misc]
    """Makes the linear layers of experts with biases."""

    def grouped_mlp_modules(self, *options: Any) -> Any:
        found = super().grouped_mlp_modules(*options)
        submodules = found[1] if isinstance(found, tuple) else found.keywords["submodules"]  # of 0.16, and of 0.19
        submodules.linear_fc2 = ExpertRowLinear
        return found


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

    def __init__(self, *arguments: Any, rotary: int | None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rotary = rotary
        self._table: Tensor | None = None

    def forward(self, hidden_states: Tensor, attention_mask: Any, *, rotary_pos_emb: Tensor | None, **options: Any) -> Any:
        if self.rotary is not None:
            assert rotary_pos_emb is not None
            self._table = rotary_pos_emb[
                self.rotary
            ]  # set again where the layer is recomputed, in the order of the backward passes
        return super().forward(hidden_states, attention_mask, **options)

    def get_query_key_value_tensors(self, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        """Return queries, keys, values, and with ``attention_output_gate`` the gate: [T, 1, heads, D] each."""
        query, key, value, *gates = super().get_query_key_value_tensors(*arguments, **options)
        if gates and (share := gates[0].shape[2] // query.shape[2]) > 1:  # 0.16 cuts only the queries where ranks share a key
            gates = [gates[0].chunk(share, 2)[self.pg_collection.tp.rank() % share]]
        if self._table is not None:
            query, key = rotate(query, self._table), rotate(key, self._table)
        return query, key, value, *gates

    def _apply_output_gate(self, attended: Tensor, gate: Tensor) -> Tensor:
        return (attended * at_least_float32(gate).sigmoid().view_as(attended)).to(attended.dtype)


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
        sinks: bool = False,
        chooser: int | None = None,
        pg_collection: Any,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.group, self.chooser = pg_collection.tp, chooser
        self.softmax_offset: nn.Parameter | None = None  # the scores of sinks
        if sinks:
            heads = config.num_attention_heads // self.group.size()
            self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=torch.cuda.current_device()))
            divide_rows(self.softmax_offset)
        self.layer, self.scale, self.window, self.softcap = layer_number - 1, softmax_scale, window, softcap

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: Any, **unused: Any
    ) -> Tensor:
        scale = self.scale if self.scale is not None else query.shape[-1] ** -0.5
        chosen = packed_seq_params.chosen.get(self.chooser)
        spec = AttentionSpec(self.layer, scale, self.window, self.softcap, self.softmax_offset, chosen)
        attended: Tensor = packed_seq_params.plan.attend(query.squeeze(1), key.squeeze(1), value.squeeze(1), spec)
        return attended.flatten(1).unsqueeze(1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        groups = {"tp_group": self.group, "dp_cp_group": metadata["dp_cp_group"]}
        own, axes = self.state_dict(keep_vars=True), {"softmax_offset": 0}
        shards: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets, **groups)
        return shards
