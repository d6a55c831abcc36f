"""The request to an attention layer: its options, the plan that decides which tokens attend to which, and attention with a dense mask."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from strop.sampling import at_least_float32


@dataclass(frozen=True)
class AttentionSpec:
    """Options of a layer's attention other than the mask."""

    layer: int
    scale: float
    window: int | None = None  # a token attends to itself and to the window - 1 positions before it
    softcap: float | None = None  # logits -> softcap * tanh(logits / softcap), Gemma 2
    sinks: Tensor | None = field(default=None, compare=False)  # [heads]: one more logit for each query, without a value (gpt-oss)
    # [T, bytes], or [T, kv_heads, bytes]: the choice of each query (``indexers``)
    chosen: Tensor | None = field(default=None, compare=False)
    block: int = 1  # positions that are chosen together
    pooled: bool = False  # after the keys of the row come those of its blocks, and the choice is among these alone
    # [S] int64, in blocks on their paths, for kernels that need them
    key_positions: Tensor | None = field(default=None, compare=False)

    def drop_unused_window(self, span: int) -> AttentionSpec:
        """Return the spec without its window if ``span`` positions fit into the window."""
        if self.window is None or span > self.window:
            return self
        return replace(self, window=None)


class AttentionPlan(Protocol):
    """Decides which tokens attend to which."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Compute attention: query [T, heads, D], key and value [T, kv_heads, D] of one flat row -> [T, heads, D]."""
        ...


# Up to this many scores, eager attention is used if it is faster than the fused kernel.
MAX_EAGER_SCORES = 1 << 25


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec, *, causal: bool = False
) -> Tensor:
    """[B, heads, Lq, D] x [B, kv_heads, Lk, D] -> [B, heads, Lq, D]; True in a boolean mask means that a query attends to a key."""
    if spec.softcap is None and spec.sinks is None and not _eager_is_faster(query, key):
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=spec.scale, enable_gqa=grouped)
    if causal:
        mask = causal_mask(query.shape[2], key.shape[2], None, query.device)
    return _eager_attention(query, key, value, mask, spec)


def _eager_is_faster(query: Tensor, key: Tensor) -> bool:
    """Return whether eager attention is faster: on a CPU in bfloat16, the fused kernel takes 2 to 5 times as long."""
    on_cpu = query.device.type == "cpu" and query.dtype == torch.bfloat16
    return on_cpu and query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] <= MAX_EAGER_SCORES


def _eager_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    batch, heads, queries, size = query.shape
    kv_heads = key.shape[1]
    rows = (query * spec.scale).reshape(batch, kv_heads, -1, size)  # query heads sharing a key-value head are adjacent
    scores = (rows @ key.transpose(2, 3)).view(batch, kv_heads, heads // kv_heads, queries, -1)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if mask is not None:
        scores = scores.masked_fill(~(mask if mask.dim() == 2 else mask.unsqueeze(1)), float("-inf"))
    weights = _softmax(at_least_float32(scores), spec).to(value.dtype)
    return (weights.view(batch, kv_heads, -1, key.shape[2]) @ value).view(batch, heads, queries, value.shape[3])


def _softmax(scores: Tensor, spec: AttentionSpec) -> Tensor:
    """[B, kv_heads, group, queries, keys], with sinks as one more key, whose weight is dropped."""
    if spec.sinks is None:
        return scores.softmax(-1)
    sinks = spec.sinks.to(scores.dtype).view(1, *scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return a [queries, keys] bool mask; queries are at the last positions of the keys and see ``window`` positions."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)
