"""Divide a batch into the shares of the ranks that read it.

The driver divides a batch before sending it, so that each rank receives only what it reads; ranks that read the same
micro-batches receive the same share. A rank given a whole batch takes its own share in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strop.data.balance import BatchPartition, RankPlan, partition_batch
from strop.data.rollout_selector import RolloutSelector
from strop.data.shares.batch_share import BatchShare
from strop.data.shares.split_rule import SplitRule
from strop.types import Batch


def divide_batch(batch: Batch, rule: SplitRule, numbers: Sequence[int] | None = None) -> list[BatchShare]:
    """Return the shares ``numbers`` of a batch; None: of all ranks, in order. Takes a few passes over the batch."""
    partition = partition_batch(batch, rule.ranks, rule.token_budget, padded=rule.padded, whole_groups=rule.whole_groups)
    selector = RolloutSelector(batch)
    dummy = selector.select((partition.dummy_sequence,)).batch
    wanted = range(rule.ranks) if numbers is None else numbers
    return [_make_share(selector, partition, rule, number, dummy) for number in wanted]


def take_share(batch: Batch | BatchShare, rule: SplitRule, number: int) -> BatchShare:
    """Return the share ``number`` of a batch, or the given share itself. Raises ValueError for another rank's share, or one
    divided by another rule.
    """
    if not isinstance(batch, BatchShare):
        return divide_batch(batch, rule, (number,))[0]
    if (batch.rule, batch.number) != (rule, number):
        raise ValueError(
            f"this rank was sent share {batch.number} of a batch, divided by {batch.rule}, and reads share {number} by {rule}: get the "
            "ranks' requests (share_requests) again after every change of their sizes"
        )
    return batch


def _make_share(selector: RolloutSelector, partition: BatchPartition, rule: SplitRule, number: int, dummy: Batch) -> BatchShare:
    plan = partition.ranks[number]
    rollouts = sorted(rollout for part in (*plan.trained, *plan.forward_only) for rollout in part)
    selected = selector.select(rollouts) if rollouts else None
    runs_dummies = rule.fills_up or () in (*plan.trained, *plan.forward_only)
    return BatchShare(
        batch=None if selected is None else selected.batch,
        index=torch.zeros(0, dtype=torch.int64) if selected is None else selected.index,
        plan=_renumber(plan, rollouts),
        dummy=dummy if runs_dummies else None,
        rule=rule,
        number=number,
        whole_tokens=len(selector.batch.tokens),
        max_over_mean=partition.max_over_mean,
    )


def _renumber(plan: RankPlan, rollouts: Sequence[int]) -> RankPlan:
    new = {old: number for number, old in enumerate(rollouts)}
    kinds = (tuple(tuple(new[rollout] for rollout in part) for part in parts) for parts in (plan.trained, plan.forward_only))
    return RankPlan(*kinds)
