"""The choice of an indexer: which tokens of its path each token attends to (DeepSeek Sparse Attention, arXiv 2512.02556).

A choice is a bitmap: bit ``p % 8`` of byte ``p // 8`` of a token's row is set if the token attends to position p of its path. As
positions are those of the path, a choice is the same in a packed tree, in a page of a cache and alone, and can be recorded. Bits are of
blocks of tokens, counted from the root, where a layer attends to blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

EVERYTHING = -1  # each byte of a token that attends to its whole path
SCORES = 1 << 26  # scores of heads at a time


@dataclass(frozen=True, eq=False)
class IndexRows:
    """What an indexer scores: token t scores token s by the sum over heads of weight[t, h] * relu(query[t, h] . key[s])."""

    query: Tensor  # [T, heads, D], at least float32, as the others
    key: Tensor  # [T, D]; [W, D] if pooled
    weight: Tensor  # [T, heads]
    count: int  # blocks that each token attends to, if its path has more
    block: int = 1  # tokens that are chosen together
    pooled: bool = False  # keys are of blocks, not of tokens

    @property
    def choices(self) -> tuple[int, ...]:
        """The shape of a token's choices: () if all heads attend to the same."""
        return ()

    def count_bytes(self, longest: int) -> int:
        """Return the bytes of a choice among the positions below ``longest``."""
        return count_bytes(-(-longest // self.block))

    def choose(self, positions: Tensor, keys: Tensor, width: int) -> Tensor:
        """Return the choice of these queries, [n, *choices, width] int8; arguments as of ``choose_tokens``."""
        return choose_tokens(self, positions, keys, width)

    def choose_everything(self) -> Tensor:
        """Return the choice of tokens whose paths have no more: without bytes, [T, 0] int8."""
        return torch.empty(len(self.query), 0, dtype=torch.int8, device=self.query.device)


class IndexerPlan(Protocol):
    """Decides which tokens an indexer may choose."""

    def choose(self, rows: IndexRows, layer: int) -> Tensor:
        """Return the choice of each token of one flat row, [T, bytes] int8; without bytes if all tokens attend to everything."""
        ...


def count_bytes(longest: int) -> int:
    """Return the bytes of a bitmap of ``longest`` bits."""
    return -(-longest // 8)


def bits_below(counts: Tensor, width: int) -> Tensor:
    """Return bitmaps [n, width] int8 in which the first ``counts`` [n] bits are set."""
    left = counts[:, None] - torch.arange(0, 8 * width, 8, device=counts.device)
    return ((1 << left.clamp_(0, 8)) - 1).to(torch.uint8).view(torch.int8)


def choose_tokens(rows: IndexRows, positions: Tensor, keys: Tensor, width: int) -> Tensor:
    """Choose for the queries [n, heads, D] at ``positions`` [n] among the keys [n or 1, K, D] at positions 0 to K - 1: [n, width] int8.
    If keys are pooled, so are positions: that of the newest complete block of a query, which also attends to the tokens after it.

    Equal scores, such as the zeros where no head is positive, are taken in the order of positions, the lowest first, so the choice depends
    neither on the width of a row nor on the device.
    """
    length, heads = keys.shape[1], rows.query.shape[1]
    size = max(1, SCORES // (heads * length))
    parts = []
    for start in range(0, len(positions), size):
        part = slice(start, start + size)
        own = keys[0] if len(keys) == 1 else keys[part]  # of a matrix alone, torch makes one product
        visible = torch.arange(length, device=keys.device) <= positions[part, None]
        scores = _score(rows.query[part], own, rows.weight[part]).masked_fill(~visible, float("-inf"))
        best = take_best(scores, rows.count) & visible
        if rows.pooled:  # the tokens after the newest block
            best = torch.nn.functional.pad(best, (0, 1)).scatter_(1, positions[part, None] + 1, True)
        chosen = pack_bits(best, width)
        parts.append(torch.where(positions[part, None] < rows.count, EVERYTHING, chosen))
    return torch.cat(parts)


def _score(query: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
    """[n, heads, D], [K, D] or [n, K, D], and [n, heads] -> [n, K]"""
    with torch.autocast(query.device.type, enabled=False):
        scores = (query @ keys.mT).relu_()
        return (weight.unsqueeze(1) @ scores).squeeze(1)


def take_best(scores: Tensor, count: int) -> Tensor:
    """Return which of the scores [n, K] are the ``count`` largest of their row, the first ones among equal ones, [n, K] bool."""
    if count >= scores.shape[1]:
        return torch.ones_like(scores, dtype=torch.bool)
    least = scores.topk(count, -1, sorted=False).values.amin(-1, keepdim=True)
    larger, equal = scores > least, scores == least
    return larger | (equal & (equal.cumsum(-1) <= count - larger.sum(-1, keepdim=True)))


def pack_bits(chosen: Tensor, width: int) -> Tensor:
    """[n, K] bool -> [n, width] int8"""
    padded = torch.nn.functional.pad(chosen, (0, 8 * width - chosen.shape[1])).view(len(chosen), width, 8)
    return (padded << torch.arange(8, device=chosen.device)).sum(-1).to(torch.uint8).view(torch.int8)


def sees(chosen: Tensor, positions: Tensor) -> Tensor:
    """Return whether tokens with the choices [..., bytes] attend to these positions of their paths, [K] or [..., K] -> [..., K] bool."""
    places = positions.expand(*chosen.shape[:-1], -1) >> 3
    return (chosen.gather(-1, places.clamp(max=chosen.shape[-1] - 1)) >> (positions & 7)) & 1 > 0
