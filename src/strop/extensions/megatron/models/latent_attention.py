"""Multi-head latent attention (DeepSeek) over a flat row."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from strop.extensions.megatron.models.rotary_tables import rotate

multi_latent_attention.HAVE_TE = HAVE_TE  # 0.16.1 asks for its classes without it: isinstance of None

LATENT_EPSILON = 1e-6  # of the norms of compressed inputs, whatever the configuration says of the others


class RowLatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron Core's latent attention whose queries and keys are made for a row: its own takes the positions 0 to T - 1.

    Its own also leaves the gradient of the keys' rotated part, which all heads share, on each tensor-parallel rank separately.
    """

    def __init__(self, *arguments: Any, rotary: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rotary = rotary
        self.kv_layernorm.eps = LATENT_EPSILON
        if self.config.q_lora_rank is not None:
            self.q_layernorm.eps = LATENT_EPSILON
        self._table: Tensor | None = None

    def forward(self, hidden_states: Tensor, attention_mask: Any, *, rotary_pos_emb: Tensor, **options: Any) -> Any:
        self._table = rotary_pos_emb[self.rotary]
        for unused in ("rotary_pos_cos", "rotary_pos_sin", "rotary_pos_cos_sin"):
            options.pop(unused, None)
        return super().forward(hidden_states, attention_mask, **options)

    def get_query_key_value_tensors(self, hidden_states: Tensor, *unused: Any, **options: Any) -> tuple[Tensor, ...]:
        """Return queries and keys [T, 1, heads, qk size], values [T, 1, heads, v size], and the two compressed inputs."""
        config, table = self.config, self._table
        compressed_query = self._compress_query(hidden_states)
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


def _rotate(heads: Tensor, table: Tensor) -> Tensor:
    """Rotate pairs of neighbours, [T, 1, heads, D]: they are first separated into halves."""
    return rotate(torch.cat((heads[..., 0::2], heads[..., 1::2]), -1), table)
