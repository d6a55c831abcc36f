"""Attention in blocks of queries and keys, in plain torch: the reference for every length, and for every option.

Scores exist for one block at a time, so memory is linear in the tokens. Blocks outside the window are skipped, and only blocks
crossed by the diagonal or a window's edge need a mask (FlashAttention-2, arXiv 2307.08691).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from strop.models.attention.attention_plan import AttentionSpec
from strop.models.attention.merged_attention import Gradients, merge_part
from strop.models.attention.tree_pieces import AttentionPiece, Levels
from strop.models.mixers.indexers import sees
from strop.sampling import at_least_float32


@dataclass(frozen=True)
class BlockwiseKernel:
    """A ``PieceKernel`` (strop.models.attention.merged_attention) for any dtype, device, window, softcap and value size."""

    queries: int = 256  # of a block
    keys: int = 256

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, levels: Levels, spec: AttentionSpec, *, final: bool = False
    ) -> tuple[Tensor, Tensor]:
        queries, keys, values = _split_heads(query * spec.scale, key.shape[1]), _by_head(key), _by_head(value)
        output = at_least_float32(query.new_zeros(*queries.shape[:3], value.shape[2]))  # [kv_heads, T, group, V]
        lse = at_least_float32(query.new_full(queries.shape[:3], float("-inf")))
        for block in self._blocks(levels, spec):
            rows, columns = _places(block)
            scores, _ = self._scores(queries[:, rows], keys[:, columns], block, spec)
            highest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
            weights = scores.sub_(highest).exp_()
            total = weights.sum(-1, keepdim=True)
            part = at_least_float32(weights.flatten(1, 2).to(value.dtype) @ values[:, columns]).view_as(output[:, rows])
            part_lse = (highest + total.log()).squeeze(-1)
            merge_part(output[:, rows], lse[:, rows], part.div_(total.clamp_(min=torch.finfo(total.dtype).tiny)), part_lse)
        return _join_heads(output), _join_heads(lse)

    def backward(
        self,
        rows: Gradients,
        output: Tensor,
        lse: Tensor,
        grad: Tensor,
        levels: Levels,
        spec: AttentionSpec,
        *,
        final: bool = False,
    ) -> Gradients:
        query, key, value = rows
        groups = key.shape[1]
        queries, keys, values = _split_heads(query * spec.scale, groups), _by_head(key), _by_head(value)
        product = at_least_float32(output) * at_least_float32(grad)
        inner, totals = _split_heads(product.sum(-1, keepdim=True), groups), _split_heads(lse.unsqueeze(-1), groups)
        outer = _split_heads(grad, groups)
        grads = [at_least_float32(torch.zeros_like(tensor)) for tensor in (queries, keys, values)]
        for block in self._blocks(levels, spec):
            places, columns = _places(block)
            scores, slope = self._scores(queries[:, places], keys[:, columns], block, spec)
            weights = scores.sub_(totals[:, places]).exp_()  # [kv_heads, n, group, keys]
            arriving = outer[:, places].flatten(1, 2)
            change = at_least_float32(arriving @ values[:, columns].mT).view_as(weights)
            change.sub_(inner[:, places]).mul_(weights)
            if slope is not None:
                change.mul_(slope)
            flat = change.flatten(1, 2).to(query.dtype)
            grads[0][:, places] += (flat @ keys[:, columns]).view_as(grads[0][:, places])
            grads[1][:, columns] += flat.mT @ queries[:, places].flatten(1, 2)
            grads[2][:, columns] += weights.flatten(1, 2).to(value.dtype).mT @ arriving
        return _join_heads(grads[0].mul_(spec.scale)), grads[1].transpose(0, 1), grads[2].transpose(0, 1)

    def _blocks(self, levels: Levels, spec: AttentionSpec) -> Iterator[AttentionPiece]:
        for level in levels:
            for piece in level:
                yield from piece.blocks(self.queries, self.keys, spec.window)

    def _scores(self, query: Tensor, key: Tensor, block: AttentionPiece, spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
        """[kv_heads, n, group, D] x [kv_heads, keys, D] -> scores [kv_heads, n, group, keys], and their derivative under a
        softcap.
        """
        scores = at_least_float32(query.flatten(1, 2) @ key.mT).view(*query.shape[:3], -1)
        slope = None
        if spec.softcap is not None:
            scores = scores.div_(spec.softcap).tanh_()
            slope = 1 - scores.square()
            scores.mul_(spec.softcap)
        if block.distance is not None:
            hidden = _hidden(block.queries, block.keys, block.distance, spec.window, scores.device)
            scores.masked_fill_(hidden, float("-inf"))
        if spec.chosen is not None and spec.key_positions is not None:
            rows, columns = _places(block)
            seen = sees(spec.chosen[rows], spec.key_positions[columns])  # [n, keys] or [n, kv_heads, keys]
            seen = seen.unsqueeze(1) if seen.dim() == 2 else seen.transpose(0, 1).unsqueeze(2)
            scores.masked_fill_(~seen, float("-inf"))
        return scores, slope


@lru_cache(maxsize=64)  # the next layer has the same arguments
def _hidden(queries: int, keys: int, distance: int, window: int | None, device: torch.device) -> Tensor:  # [queries, 1, keys]
    rows = torch.arange(distance, distance + queries, device=device)
    apart = rows[:, None] - torch.arange(keys, device=device)[None]
    return ((apart < 0) if window is None else (apart < 0) | (apart >= window)).unsqueeze(1)


def _places(block: AttentionPiece) -> tuple[slice, slice]:
    return slice(block.query, block.query + block.queries), slice(block.key, block.key + block.keys)


def _split_heads(rows: Tensor, groups: int) -> Tensor:
    """[T, heads, D] -> [groups, T, heads / groups, D]: the query heads that share a key-value head are grouped per row."""
    split: Tensor = rows.unflatten(1, (groups, -1))  # type: ignore[no-untyped-call]
    return split.transpose(0, 1).contiguous()


def _join_heads(split: Tensor) -> Tensor:
    """[groups, T, heads / groups, ...] -> [T, heads, ...]"""
    return split.transpose(0, 1).flatten(1, 2)


def _by_head(rows: Tensor) -> Tensor:
    """[T, kv_heads, D] -> [kv_heads, T, D]"""
    return rows.transpose(0, 1).contiguous()
