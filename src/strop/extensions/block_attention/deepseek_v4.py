"""DeepSeek V4: tokens attend to a sliding window, and to blocks of their path that are compressed into one key each.

Heavily compressed attention reads all blocks (of 128 tokens), compressed sparse attention the best ones of an indexer (of 4 tokens, each
weighed together with those of the block before it). The modules of Transformers project, and plans decide which tokens a block has.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.mixers.indexers import IndexRows, PathBlocks
from strop.models.mixers.mixer_interface import running_call
from strop.sampling import at_least_float32


class BlockCompressor(nn.Module):
    """Mixin for both kinds of compressors, with an indexer or without."""

    compress_rate: int

    def forward(
        self, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, past_key_values: Any, layer_idx: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the key of each block [1, 1, W, D]. Attention gets which blocks tokens attend to from the call."""
        call = running_call()
        if call is None:
            found: tuple[Tensor, Tensor | None] = super().forward(  # type: ignore[misc]
                hidden_states, q_residual, position_ids, past_key_values, layer_idx
            )
            return found
        choose = getattr(self, "indexer", None)
        chosen = None if choose is None else choose(hidden_states, q_residual, position_ids, past_key_values, layer_idx)[0]
        call.attend_to_blocks(self.compress_rate, chosen, pooled=True)
        return compress(self, hidden_states[0], call.plan.blocks(self.compress_rate))[None, None], None


class BlockIndexer(nn.Module):
    """Mixin for the indexer of compressed sparse attention."""

    chooses_tokens = True  # blocks of them
    compress_rate: int
    index_topk: int
    head_dim: int
    q_b_proj: nn.Linear
    scorer: Any
    rotary_emb: Any
    rope_layer_type: str

    @torch.no_grad()
    def forward(
        self, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, past_key_values: Any, layer_idx: int
    ) -> Tensor:
        """Return the choice of each token, [1, T, bytes]."""
        call = running_call()
        if call is None:
            indices: Tensor = super().forward(  # type: ignore[misc]
                hidden_states, q_residual, position_ids, past_key_values, layer_idx
            )
            return indices
        keys = compress(self, hidden_states[0], call.plan.blocks(self.compress_rate))
        query = self.q_b_proj(q_residual).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query = rotate(self, query, hidden_states, position_ids)[0].transpose(0, 1)
        weight = self.scorer.weights_proj(hidden_states)[0]
        query, keys, weight = (at_least_float32(each) for each in (query, keys, weight))  # scales change no choice
        rows = IndexRows(query, keys, weight, self.index_topk, self.compress_rate, pooled=True)
        return call.choose(rows, layer_idx)[None]


def compress(module: Any, hidden: Tensor, blocks: PathBlocks) -> Tensor:
    """Weigh the projections of each block's tokens, and rotate the sum as its first token: [T, H] -> [W, D]"""
    kv, gate = (blocks.take(project(hidden)) for project in (module.kv_proj, module.gate_proj))
    gate = gate + module.position_bias  # [W, size, D or 2 D]
    size = module.head_dim
    if kv.shape[-1] > size:  # the first half is a token's part in the block after its own
        kv = torch.cat([blocks.shift(kv[..., :size], 0.0), kv[..., size:]], 1)
        gate = torch.cat([blocks.shift(gate[..., :size], float("-inf")), gate[..., size:]], 1)
    pooled = module.kv_norm((kv * at_least_float32(gate).softmax(1).to(kv.dtype)).sum(1))
    return rotate(module, pooled[None, None], pooled, blocks.index[None] * blocks.size)[0, 0]


def rotate(module: Any, rows: Tensor, like: Tensor, positions: Tensor) -> Tensor:
    """[1, heads, n, D] at positions [1, n], with the rotary embedding that a compressor has of its own, in the dtype of ``like``."""
    cos, sin = module.rotary_emb(like, position_ids=positions, layer_type=module.rope_layer_type)
    rotated: Tensor = sys.modules[type(module).__module__].apply_rotary_pos_emb(rows, cos, sin)
    return rotated
