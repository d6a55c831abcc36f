"""Functions for losses over groups of two rollouts."""

from __future__ import annotations

from strop.lazy_torch import Tensor, torch
from strop.types import Batch, Group


def view_as_pairs(values: Tensor, batch: Batch) -> Tensor:
    """View a column of rollouts [S] as pairs [P, 2]. Raises ValueError if a group does not have two rollouts."""
    group = batch.group
    if len(group) % 2 or not torch.equal(group[0::2], group[1::2]) or bool((group[1:-1:2] == group[2::2]).any()):
        raise ValueError(
            "a loss over pairs got a group that does not have two rollouts; a learner must not split a group (whole_groups), and a "
            "preference has one chosen and one rejected completion"
        )
    return values.view(-1, 2)


def mean_over_pairs(values: Tensor, batch: Batch) -> Tensor:
    """Return the contribution of these pairs [P] to the mean over all pairs of the optimizer step."""
    return values.sum() / max(batch.totals.groups, 1)


def mean_over_rollouts(values: Tensor, batch: Batch) -> Tensor:
    """Return the contribution of these rollouts [S] to the mean over all rollouts of the optimizer step."""
    return values.sum() / max(batch.totals.sequences, 1)


def pair_advantages(group: Group) -> Tensor:
    """Return placeholder advantages, [2], which the loss does not use. Raises ValueError if the group does not have two rollouts."""
    if len(group.rollouts) != 2:
        raise ValueError(
            f"{group.task.id}: found a group of {len(group.rollouts)} rollouts, but this algorithm needs two: a preference pair, or a "
            "desirable or undesirable completion and an unrelated one"
        )
    return torch.ones(2, dtype=torch.float64)
