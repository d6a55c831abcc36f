"""GLM-5.3: an indexer that pools the keys of blocks of tokens, and chooses blocks. The tokens after the last complete block are chosen too.

The choice is that of the following layers as well, if they have no indexer of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.models.mixers.indexers import IndexRows, UnknownIndexer
from strop.models.mixers.mixer_interface import running_call
from strop.sampling import at_least_float32


class PooledIndexer(nn.Module):
    """Mixin for the indexer."""

    chooses_tokens = True
    layer_idx: int
    index_topk: int
    index_kpool: int
    index_kpool_always_select_tail: bool
    index_kpool_compress_gate: Tensor  # [D, H]
    index_kpool_compress_ape: Tensor  # [size, D]
    head_dim: int
    wq_b: nn.Linear
    wk: nn.Linear
    k_norm: nn.LayerNorm
    weights_proj: nn.Linear

    @torch.no_grad()
    def forward(self, hidden_states: Tensor, q_resid: Tensor, attention_mask: Tensor, past_key_values: Any) -> Tensor:
        """Return the choice of each token, [1, T, bytes]. Raises UnknownIndexer for one that leaves out the tokens after blocks."""
        call = running_call()
        if call is None:
            indices: Tensor = super().forward(hidden_states, q_resid, attention_mask, past_key_values)  # type: ignore[misc]
            return indices
        if not self.index_kpool_always_select_tail:
            raise UnknownIndexer(
                f"{type(self).__name__} of layer {self.layer_idx} leaves out the tokens after the last complete block"
            )
        hidden, blocks = hidden_states[0], call.plan.blocks(self.index_kpool)
        key = self.k_norm(self.wk(hidden))
        gate = at_least_float32(blocks.take(F.linear(hidden, self.index_kpool_compress_gate))) + self.index_kpool_compress_ape
        pooled = (blocks.take(key) * gate.softmax(1).to(key.dtype)).sum(1)
        query = self.wq_b(q_resid[0]).unflatten(-1, (-1, self.head_dim))
        query, pooled, weight = (at_least_float32(each) for each in (query, pooled, self.weights_proj(hidden)))
        rows = IndexRows(query, pooled, weight, self.index_topk // self.index_kpool, self.index_kpool, pooled=True)
        return call.choose(rows, self.layer_idx)[None]


class ChosenBlockAttention(nn.Module):
    """Mixin for the attention, which would make a mask of the choice."""

    config: Any

    def build_attention_mask_from_topk(self, topk_indices: Tensor, query_states: Tensor, kv_length: int) -> Tensor | None:
        call = running_call()
        if call is None:
            mask: Tensor = super().build_attention_mask_from_topk(topk_indices, query_states, kv_length)  # type: ignore[misc]
            return mask
        call.attend_to_blocks(self.config.index_kpool, topk_indices[0])
        return None
