"""Columns of a batch that several processes fill, each for its groups: a contiguous share of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.data.packing import Part, select
from strop.types import Batch


@dataclass(frozen=True)
class Filled:
    """Columns of some places of a batch."""

    index: Tensor  # [n] int64, into the whole batch's N
    columns: Mapping[str, Tensor]  # [n] or [n, K]


@dataclass(frozen=True)
class GroupShare:
    """Groups ``first`` to ``last`` (not included) of a batch."""

    first: int
    last: int

    @property
    def empty(self) -> bool:
        return self.first == self.last

    def of(self, batch: Batch) -> Part:
        """The batch of these groups alone. There must be one."""
        own = ((batch.group >= self.first) & (batch.group < self.last)).nonzero().flatten().tolist()
        return select(batch, own)


def group_share(groups: int, place: int, of: int) -> GroupShare:
    """The share of whoever stands at ``place`` among ``of``; empty for some where there are fewer groups."""
    return GroupShare(place * groups // of, (place + 1) * groups // of)


def joined(answers: Sequence[Filled], length: int) -> dict[str, Tensor]:
    """The columns of the whole batch, [N] or [N, K] with N = ``length``, from answers that share no place."""
    found: dict[str, Tensor] = {}
    for name, example in answers[0].columns.items():
        found[name] = torch.zeros(length, *example.shape[1:], dtype=example.dtype)
        for answer in answers:
            found[name][answer.index] = answer.columns[name]
    return found
