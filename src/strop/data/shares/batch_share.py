"""The share of a batch that one rank reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from strop.data.balance import RankPlan
from strop.data.rollout_selector import RolloutSelector, SubBatch
from strop.data.shares.split_rule import SplitRule
from strop.types import Batch


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchShare:
    """The rollouts that one rank reads of a batch, and how it cuts them into micro-batches.

    The micro-batches are, to the last bit, those that the rank would cut out of the whole batch: the denominators are those of the whole
    optimizer step (law 1).
    """

    batch: Batch | None  # the rank's rollouts; None if it reads none
    index: Tensor  # [n] int64: where the predicted tokens of ``batch`` are in the whole batch's N
    plan: RankPlan  # as tuples of rollouts of ``batch``
    dummy: Batch | None  # the shortest rollout of the whole batch, for dummy micro-batches; None if the rank runs none
    rule: SplitRule
    number: int  # of this share among ``rule.ranks``
    whole_tokens: int  # T of the whole batch
    max_over_mean: float  # tokens of the fullest rank over the mean of all ranks

    def micro_batches(self) -> Iterator[tuple[SubBatch | None, bool]]:
        """Yield each micro-batch, with places in the whole batch's N, and whether it has zero gradient; None where a dummy runs."""
        selector = None if self.batch is None else RolloutSelector(self.batch)
        for parts, zero_gradient in ((self.plan.trained, False), (self.plan.forward_only, True)):
            for part in parts:
                yield (self._select(selector, part) if selector is not None and part else None), zero_gradient

    def _select(self, selector: RolloutSelector, part: tuple[int, ...]) -> SubBatch:
        selected = selector.select(part)
        return SubBatch(selected.batch, self.index[selected.index])

    def require_dummy(self) -> Batch:
        """Return what a dummy micro-batch reads. Only for a rank that runs one."""
        assert self.dummy is not None, f"share {self.number} was divided by {self.rule}, which runs no dummies"
        return self.dummy

    def without_routes(self) -> BatchShare:
        batch, dummy = (None if part is None else replace(part, routes=None) for part in (self.batch, self.dummy))
        return replace(self, batch=batch, dummy=dummy)


def without_routes(batch: Batch | BatchShare) -> Batch | BatchShare:
    """Return a batch without the recorded experts, for a network with a routing of its own."""
    return batch.without_routes() if isinstance(batch, BatchShare) else replace(batch, routes=None)


def count_tokens(batch: Batch | BatchShare) -> int:
    """Return how many tokens the networks of all ranks read of a batch, T."""
    return batch.whole_tokens if isinstance(batch, BatchShare) else len(batch.tokens)


def require_whole(batch: Batch | BatchShare) -> Batch:
    """Return a batch that has not been divided. Raises TypeError for a share."""
    if isinstance(batch, BatchShare):
        raise TypeError(
            f"share {batch.number} of {batch.rule.ranks} of a batch arrived at a network on a single device, which reads whole batches; "
            "send it the batch"
        )
    return batch
