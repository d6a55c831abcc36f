"""Balance the rollouts of a batch over data-parallel ranks and their micro-batches. Deterministic: every rank computes the same result.

Ranks synchronize in every layer of every micro-batch, to gather weights and to reduce gradients. So all ranks have the same
number of micro-batches, and concurrent micro-batches should have the same size, because all ranks wait for the slowest. For the
same reason, rollouts with zero gradient go into separate micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from strop.data.splitting import find_rollout_segments, group_members, pack_first_fit, split_group
from strop.types import Batch

Unit = tuple[list[int], int]  # rollouts that stay together, and their number of tokens without shared prefixes


@dataclass(frozen=True)
class RankPlan:
    """The micro-batches of one rank, as tuples of rollouts; () is a dummy micro-batch."""

    trained: tuple[tuple[int, ...], ...]
    forward_only: tuple[tuple[int, ...], ...]  # without a backward pass


@dataclass(frozen=True)
class BatchPartition:
    """The micro-batches of every rank. All ranks have the same number of each kind."""

    ranks: tuple[RankPlan, ...]
    tokens_per_rank: tuple[int, ...]
    dummy_sequence: int  # the shortest rollout, for dummy micro-batches

    @property
    def max_over_mean(self) -> float:
        """Tokens of the fullest rank over the mean of all ranks; 1 is perfect balance."""
        return max(self.tokens_per_rank) * len(self.tokens_per_rank) / max(sum(self.tokens_per_rank), 1)


def partition_batch(
    batch: Batch, ranks: int, token_budget: int, *, padded: bool = False, whole_groups: bool = False
) -> BatchPartition:
    """Assign a batch's rollouts to ``ranks``, in micro-batches of at most ``token_budget`` tokens (more only for a single larger unit).

    A unit is a group, or a part of a group that is larger than the budget or than an even share; with ``whole_groups``, always a
    group. Units are assigned largest first to the rank with the fewest tokens, so that no rank exceeds the mean by more than one
    unit (each counted separately, without shared prefixes). With ``padded``, every rollout counts as a row as long as the longest
    of the batch.
    """
    costs = _TokenCounter(batch, padded)
    flags = [False] * batch.num_sequences if batch.zero_gradient is None else batch.zero_gradient.tolist()
    kinds = []
    for kind in (False, True):
        units = _build_units(batch, costs, ranks, token_budget, whole_groups)
        assigned = _distribute_evenly([unit for unit in units if all(flags[sequence] for sequence in unit[0]) == kind], ranks)
        kinds.append(_align_micro_batches(assigned, token_budget, costs))
    plans = tuple(RankPlan(trained, forward_only) for trained, forward_only in zip(*kinds, strict=True))
    return BatchPartition(
        ranks=plans,
        tokens_per_rank=tuple(sum(costs.count(part) for part in plan.trained + plan.forward_only) for plan in plans),
        dummy_sequence=min(range(batch.num_sequences), key=lambda sequence: costs.count([sequence])),
    )


class _TokenCounter:
    """Counts the tokens of rollouts in one micro-batch, with shared prefixes counted once."""

    def __init__(self, batch: Batch, padded: bool) -> None:
        self.lengths: list[int] = batch.segment_length.tolist()
        self.row_length = int(batch.positions.max()) + 1 if padded else None
        self.rows = [len(paths) for paths in batch.rollout_paths()]  # rows of each rollout if padded
        self.segments = find_rollout_segments(batch)

    def count(self, sequences: Sequence[int]) -> int:
        if self.row_length is not None:
            return self.row_length * sum(self.rows[sequence] for sequence in sequences)
        return sum(self.lengths[segment] for segment in set().union(*(self.segments[sequence] for sequence in sequences)))


def _build_units(batch: Batch, costs: _TokenCounter, ranks: int, token_budget: int, whole_groups: bool) -> list[Unit]:
    members = group_members(batch)
    groups = [(sequences, costs.count(sequences)) for sequences in members]
    if whole_groups:
        return groups
    if costs.row_length is not None:
        return [([sequence], costs.count([sequence])) for sequences in members for sequence in sequences]
    limit = min(token_budget, -(-sum(size for _, size in groups) // ranks))
    return [unit for sequences, _ in groups for unit in split_group(sequences, costs.segments, costs.lengths, limit)]


def _distribute_evenly(units: Iterable[Unit], bins: int) -> list[list[Unit]]:
    """Assign units, largest first, to the bin with the fewest tokens; ties go to the first bin."""
    assigned: list[list[Unit]] = [[] for _ in range(bins)]
    sizes = [(0, index) for index in range(bins)]  # a heap, so that a thousand bins take hardly longer than ten
    for unit in sorted(units, key=lambda unit: -unit[1]):
        size, index = sizes[0]
        assigned[index].append(unit)
        heapq.heapreplace(sizes, (size + unit[1], index))
    return assigned


def _align_micro_batches(
    ranks: Sequence[Sequence[Unit]], token_budget: int, costs: _TokenCounter
) -> list[tuple[tuple[int, ...], ...]]:
    """Return the micro-batches of each rank, largest first. Every rank gets as many as the rank that needs the most."""
    packed_ranks = [pack_first_fit(list(units), token_budget) for units in ranks]
    count = max(map(len, packed_ranks))
    plans = []
    for units, packed in zip(ranks, packed_ranks, strict=True):
        bins = _distribute_evenly(units, count)
        parts = [sorted(sequence for members, _ in bin_units for sequence in members) for bin_units in bins]
        fits = (len(bin_units) <= 1 or costs.count(part) <= token_budget for bin_units, part in zip(bins, parts, strict=True))
        chosen = parts if all(fits) else packed + [[]] * (count - len(packed))
        plans.append(tuple(sorted(map(tuple, chosen), key=costs.count, reverse=True)))
    return plans
