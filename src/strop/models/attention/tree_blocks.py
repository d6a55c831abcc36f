"""Blocks of consecutive tokens in a forest of segments, for layers that pool keys of a block (as DeepSeek V4).

Blocks are counted from the root of a path, so segments may begin and end inside of one. A block belongs to its last token: one that lies in
a shared prefix is there once for all paths, and one that straddles a fork once for each child.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.models.attention.tree_pieces import AttentionPiece, Levels, TreeSegments
from strop.models.mixers.chosen_tokens import bits_below, count_bytes


@dataclass(frozen=True, eq=False)
class TreeBlocks:
    """The W complete blocks of a row of T tokens."""

    size: int  # tokens of a block
    places: Tensor  # [W, size] int64: of its tokens in the row
    index: Tensor  # [W] int64: its number on its path
    before: Tensor  # [W] int64: the block before it on its path; -1: it is the first
    ended: Tensor  # [T, bytes]: bitmap of the blocks that have ended at a token
    levels: Levels  # each query of a segment and each block that ends in the segment or above; keys are counted from T
    paths: Mapping[int, Tensor]  # segment -> the blocks on its path
    gather: Callable[[Tensor], Tensor] | None = None  # rows of this rank -> those of all ranks

    def take(self, rows: Tensor) -> Tensor:
        """[T, ...] -> [W, size, ...]"""
        rows = rows if self.gather is None else self.gather(rows)
        return rows.index_select(0, self.places.flatten()).view(*self.places.shape, *rows.shape[1:])

    def shift(self, blocks: Tensor, fill: float) -> Tensor:
        """[W, ...] -> those of the blocks before, and ``fill`` where there is none."""
        first = (self.before < 0).view(-1, *[1] * (blocks.dim() - 1))
        return blocks.index_select(0, self.before.clamp(min=0)).masked_fill(first, fill)


def find_blocks(
    segments: TreeSegments, size: int, path_of: Callable[[int], Tensor], positions: Tensor, longest: int
) -> TreeBlocks:
    """``path_of``: segment -> the places in the row of the tokens from the root to its end. ``positions`` [T] on their paths."""
    places, index, before = [], [], []
    paths: dict[int, Tensor] = {-1: positions.new_empty(0)}
    ranges: dict[int, tuple[int, int]] = {}  # the start of a segment in the row -> its first block, and how many end in it
    total = 0
    for segment, _, position in segments.walk():
        length, above = segments.lengths[segment], paths[segments.parents[segment]]
        first, last = position // size, (position + length) // size
        own = torch.arange(total, total + last - first, device=positions.device)
        paths[segment] = torch.cat([above, own])
        if length:
            ranges[segments.starts[segment]] = total, last - first
        if last > first:
            places.append(path_of(segment)[first * size : last * size].view(-1, size))
            index.append(torch.arange(first, last, device=positions.device))
            before.append(torch.cat([own.new_full((1,), -1), paths[segment]])[first:last])
            total += last - first
    count, empty = len(positions), positions.new_empty(0)
    pieces = (
        [AttentionPiece(each.query, each.queries, count + ranges[each.key][0], ranges[each.key][1]) for each in level]
        for level in segments.levels()
    )
    levels = tuple(tuple(piece for piece in level if piece.keys) for level in pieces)
    return TreeBlocks(
        size,
        torch.cat([empty.view(0, size), *places]),
        torch.cat([empty, *index]),
        torch.cat([empty, *before]),
        bits_below((positions + 1) // size, count_bytes(-(-longest // size))),
        levels,
        paths,
    )
