"""Blocks of consecutive tokens along the paths of a tree, for layers that pool the keys of a block.

Blocks are counted from the root of a path, so segments may begin and end inside of one. A block belongs to its last token: one that lies in
a shared prefix is there once for all paths, and one that straddles a fork once for each child.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class PathBlocks:
    """The W complete blocks of a row of T tokens."""

    size: int  # tokens of a block
    places: Tensor  # [W, size] int64: of its tokens in the row
    index: Tensor  # [W] int64: its number on its path
    before: Tensor  # [W] int64: the block before it on its path; -1: it is the first
    gather: Callable[[Tensor], Tensor] | None = None  # rows of this rank -> those of all ranks

    def take(self, rows: Tensor) -> Tensor:
        """[T, ...] -> [W, size, ...]"""
        rows = rows if self.gather is None else self.gather(rows)
        return rows.index_select(0, self.places.flatten()).view(*self.places.shape, *rows.shape[1:])

    def shift(self, blocks: Tensor, fill: float) -> Tensor:
        """[W, ...] -> those of the blocks before, and ``fill`` where there is none."""
        first = (self.before < 0).view(-1, *[1] * (blocks.dim() - 1))
        return blocks.index_select(0, self.before.clamp(min=0)).masked_fill(first, fill)
