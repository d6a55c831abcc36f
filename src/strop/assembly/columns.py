"""Columns of a batch that several processes fill, each for a contiguous range of its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.data.packing import Part, select
from strop.types import Batch


@dataclass(frozen=True)
class Filled:
    """Columns for some of the predicted tokens of a batch."""

    index: Tensor  # [n] int64, positions in the N of the whole batch
    columns: Mapping[str, Tensor]  # [n] or [n, K]


@dataclass(frozen=True)
class GroupShare:
    """Groups ``start`` to ``stop`` (excluded) of a batch."""

    first: int
    last: int

    @property
    def empty(self) -> bool:
        return self.first == self.last

    def of(self, batch: Batch) -> Part:
        """Return the batch of these groups alone. The range must not be empty."""
        own = ((batch.group >= self.first) & (batch.group < self.last)).nonzero().flatten().tolist()
        return select(batch, own)


def group_share(groups: int, place: int, of: int) -> GroupShare:
    """Return the range of groups for process ``rank`` of ``count``; it may be empty if there are fewer groups than processes."""
    return GroupShare(place * groups // of, (place + 1) * groups // of)


def joined(answers: Sequence[Filled], length: int) -> dict[str, Tensor]:
    """Merge columns with disjoint indices into columns of the whole batch, [N] or [N, K] with N = ``length``."""
    found: dict[str, Tensor] = {}
    for name, example in answers[0].columns.items():
        found[name] = torch.zeros(length, *example.shape[1:], dtype=example.dtype)
        for answer in answers:
            found[name][answer.index] = answer.columns[name]
    return found
