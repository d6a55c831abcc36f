"""Groups of two rollouts: what a loss that compares them, or needs both, is handed."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.types import Batch, Group


def pairs(values: Tensor, batch: Batch) -> Tensor:
    """Columns of rollouts, [S], by group, [P, 2]. Raises ValueError where a group is not two rollouts."""
    group = batch.group
    if len(group) % 2 or not torch.equal(group[0::2], group[1::2]) or bool((group[1:-1:2] == group[2::2]).any()):
        raise ValueError(
            "a loss over pairs was handed a group that is not two rollouts; a learner must not cut one (whole_groups), and a preference "
            "has one chosen and one rejected completion"
        )
    return values.view(-1, 2)


def mean_over_pairs(values: Tensor, batch: Batch) -> Tensor:
    """The part of a mean over all pairs of the optimizer step that these pairs, [P], give."""
    return values.sum() / max(batch.totals.groups, 1)


def pair_credit(group: Group) -> Tensor:
    """Credit that is not looked at, [2]. Raises ValueError for a group of another size."""
    if len(group.rollouts) != 2:
        raise ValueError(
            f"{group.task.id}: a group of {len(group.rollouts)} rollouts, where this algorithm learns from two: a preference pair, or a "
            "judged completion and an unrelated one"
        )
    return torch.ones(2, dtype=torch.float64)
