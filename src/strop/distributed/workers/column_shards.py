"""Columns of a batch that several processes fill, each for a contiguous range of its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.data.rollout_selector import SubBatch
from strop.data.splitting import select_rollouts
from strop.types import Batch


@dataclass(frozen=True)
class ColumnShard:
    """Columns for some of the predicted tokens of a batch."""

    index: Tensor  # [n] int64, positions in the N of the whole batch
    columns: Mapping[str, Tensor]  # [n] or [n, K]


@dataclass(frozen=True)
class GroupRange:
    """Groups ``start`` to ``stop`` (excluded) of a batch."""

    start: int
    stop: int

    @property
    def is_empty(self) -> bool:
        return self.start == self.stop

    def select(self, batch: Batch) -> SubBatch:
        """Return the batch of these groups only. The range must not be empty."""
        rollouts = ((batch.group >= self.start) & (batch.group < self.stop)).nonzero().flatten().tolist()
        return select_rollouts(batch, rollouts)


def split_groups(groups: int, rank: int, count: int) -> GroupRange:
    """Return the range of groups for process ``rank`` of ``count``; it may be empty if there are fewer groups than processes."""
    return GroupRange(rank * groups // count, (rank + 1) * groups // count)


def merge_columns(shards: Sequence[ColumnShard], length: int) -> dict[str, Tensor]:
    """Merge columns with disjoint indices into columns of the whole batch, [N] or [N, K] with N = ``length``."""
    merged: dict[str, Tensor] = {}
    for name, example in shards[0].columns.items():
        merged[name] = torch.zeros(length, *example.shape[1:], dtype=example.dtype)
        for shard in shards:
            merged[name][shard.index] = shard.columns[name]
    return merged
