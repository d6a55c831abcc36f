"""What the compiled kernels for a paged key-value cache compute, in plain torch.

Keys and values are [P, KV, page, D]: P pages of ``page`` positions. Position j of sequence b is at position j % page of page
table[b, j // page]. A cache of fixed slots is the special case of one page for each sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strop.models.attention.attention_plan import AttentionSpec, masked_attention


def attend_pages(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of one query per sequence, [B, H, D], over the first lengths [B] int32 positions of its pages, table [B, n] int32.

    The query is at position lengths - 1, which a sliding window counts back from. Returns [B, H, D].
    """
    gathered = [_gather_pages(cache, table) for cache in (keys, values)]  # [B, KV, n * page, D]
    span = gathered[0].shape[2]
    distance = lengths[:, None] - 1 - torch.arange(span)[None]
    visible = (distance >= 0) & (distance < (window or span))
    spec = AttentionSpec(0, scale, None, softcap)
    return masked_attention(query[:, :, None], gathered[0], gathered[1], visible[:, None, None], spec)[:, :, 0]


def _gather_pages(cache: Tensor, table: Tensor) -> Tensor:
    return cache[table.long()].transpose(1, 2).flatten(2, 3)
