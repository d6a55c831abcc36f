"""MiniMax M3: each head of an indexer chooses blocks of tokens for one key head, by the best score of a token in them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.models.mixers.indexers import SCORES, IndexRows, UnknownIndexer, pack_bits, take_best
from strop.models.mixers.mixer_interface import running_call
from strop.sampling import at_least_float32


@dataclass(frozen=True, eq=False)
class BlockRows(IndexRows):
    """What the indexer scores: each head by itself, without weights."""

    local: int = 1  # blocks before a token, and its own, that are always chosen

    @property
    def choices(self) -> tuple[int, ...]:
        return (self.query.shape[1],)

    def choose(self, positions: Tensor, keys: Tensor, width: int) -> Tensor:
        """[n, heads, width]; ``keys`` [1, K, D] are those at positions 0 to K - 1."""
        length, heads = keys.shape[1], self.query.shape[1]
        size = max(1, SCORES // (heads * length))
        places, parts = torch.arange(length, device=keys.device), []
        local = torch.arange(self.local, device=keys.device)
        for start in range(0, len(positions), size):
            part = positions[start : start + size, None]
            with torch.autocast(keys.device.type, enabled=False):
                scores = self.query[start : start + size] @ keys[0].mT
            scores = scores.masked_fill((places > part).unsqueeze(1), float("-inf"))
            scores = F.pad(scores, (0, -length % self.block), value=float("-inf")).unflatten(-1, (-1, self.block)).amax(-1)
            nearest = (part // self.block - local).clamp_(min=0).unsqueeze(1).expand(-1, heads, -1)
            flat = scores.scatter_(2, nearest, float("inf")).flatten(0, 1)
            best = take_best(flat, self.count) & (flat > float("-inf"))
            parts.append(pack_bits(best, width).view(-1, heads, width))
        return torch.cat(parts)


class HeadIndexer(nn.Module):
    """Mixin for the indexer."""

    chooses_tokens = True
    config: Any
    layer_idx: int
    num_heads: int
    head_dim: int
    block_size: int
    topk_blocks: int
    local_blocks: int
    q_proj: nn.Linear
    k_proj: nn.Linear
    q_norm: nn.Module
    k_norm: nn.Module

    @property
    def choices(self) -> int:
        return self.num_heads

    @torch.no_grad()
    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], past_key_values: Any, position_ids: Tensor
    ) -> Tensor:
        """Return the choice of each token, [1, T, heads, bytes]. Raises UnknownIndexer if its heads are not as many as those of keys."""
        call = running_call()
        if call is None:
            indices: Tensor = super().forward(  # type: ignore[misc]
                hidden_states, position_embeddings, past_key_values, position_ids
            )
            return indices
        if self.num_heads != self.config.num_key_value_heads:
            raise UnknownIndexer(f"{type(self).__name__} of layer {self.layer_idx} has more or fewer heads than keys")
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        cos, sin = (each[..., : self.head_dim] for each in position_embeddings)
        query, key = sys.modules[type(self).__module__].apply_rotary_pos_emb(query, key, cos, sin)
        query, key = at_least_float32(query[0].transpose(0, 1)), at_least_float32(key[0, 0])
        rows = BlockRows(query, key, query[..., 0], self.topk_blocks, self.block_size, local=self.local_blocks)
        chosen = call.choose(rows, self.layer_idx)
        call.attend_to_blocks(self.block_size, chosen)
        return chosen[None]
