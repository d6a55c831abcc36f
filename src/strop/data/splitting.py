"""Split a batch into mini-batches and micro-batches without changing the context of any token (law 1), balanced over ranks. Deterministic.

Every rollout stays whole, and a micro-batch keeps the totals of its optimizer step.

Ranks synchronize in every layer of every micro-batch, to gather weights and to reduce gradients. So all ranks have the same
number of micro-batches, and concurrent micro-batches should have the same size, because all ranks wait for the slowest. For the
same reason, rollouts with zero gradient go into separate micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from strop.data.rollout_selector import RolloutSelector, SubBatch
from strop.types import Batch


def select_rollouts(batch: Batch, sequences: Sequence[int]) -> SubBatch:
    """Return some rollouts as a batch with the totals of the full batch. It includes their shared prefixes once."""
    return RolloutSelector(batch).select(sequences)


def find_rollout_segments(batch: Batch) -> list[set[int]]:
    """Return the segments of each rollout, its shared prefixes included."""
    return [{segment for path in paths for segment in path} for paths in batch.rollout_paths()]


def split_micro_batches(batch: Batch, token_budget: int, *, padded: bool = False, whole_groups: bool = False) -> list[SubBatch]:
    """Split a batch into micro-batches of at most ``token_budget`` tokens, at group boundaries where a group fits.

    A larger group is split between its rollouts, with its prompt in each part; a single rollout over the budget gets its own
    micro-batch. First fit, longest first: few micro-batches, and deterministic. With ``padded``, every path of a rollout counts
    as a row as long as the longest. Groups with zero gradient do not share a micro-batch with others. With ``whole_groups``,
    groups are never split, for losses that compare the rollouts of a group.
    """
    lengths, segments = batch.segment_length.tolist(), find_rollout_segments(batch)
    budget = 1 << 62 if whole_groups else token_budget
    units = [unit for members in group_members(batch) for unit in split_group(members, segments, lengths, budget)]
    if padded:
        longest, paths = int(batch.positions.max()) + 1, batch.rollout_paths()
        together = group_members(batch) if whole_groups else [[sequence] for sequence in range(batch.num_sequences)]
        units = [(sequences, longest * sum(len(paths[sequence]) for sequence in sequences)) for sequences in together]
    zero_gradient = [False] * batch.num_sequences if batch.zero_gradient is None else batch.zero_gradient.tolist()
    by_kind = [[unit for unit in units if all(zero_gradient[sequence] for sequence in unit[0]) == kind] for kind in (False, True)]
    selector = RolloutSelector(batch)
    return [selector.select(sequences) for kind in by_kind for sequences in pack_first_fit(kind, token_budget)]


def pack_first_fit(units: list[tuple[list[int], int]], budget: int) -> list[list[int]]:
    """Pack units of (rollouts, size) into bins of at most ``budget``, largest first. Return the rollouts of each bin."""
    bins: list[list[int]] = []
    leaves = 1 << max(len(units) - 1, 0).bit_length()
    room = [budget] * (2 * leaves)  # a tree: the room of bin i at leaves + i, and the most of two nodes above them
    for sequences, size in sorted(units, key=lambda unit: -unit[1]):
        node = 1 if size <= budget else leaves + len(bins)  # a unit over the budget gets its own bin
        while node < leaves:
            node = 2 * node + (room[2 * node] < size)
        if node == leaves + len(bins):
            bins.append([])
        bins[node - leaves].extend(sequences)
        room[node] -= size
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [sorted(sequences) for sequences in bins]


def split_mini_batches(batch: Batch, count: int) -> list[SubBatch]:
    """Split a batch into ``count`` mini-batches at group boundaries, in order, each with its own totals. Raises ValueError if uneven."""
    members = group_members(batch)
    if len(members) % count:
        raise ValueError(f"{len(members)} groups cannot be split into {count} equal mini-batches")
    per_step = len(members) // count
    steps = [members[start : start + per_step] for start in range(0, len(members), per_step)]
    selector = RolloutSelector(batch)
    parts = [selector.select([sequence for group in groups for sequence in group]) for groups in steps]
    return [SubBatch(part.batch.with_totals(), part.index) for part in parts]


def group_members(batch: Batch) -> list[list[int]]:
    members: list[list[int]] = [[] for _ in range(batch.num_groups)]
    for sequence, group in enumerate(batch.group.tolist()):
        members[group].append(sequence)
    return members


def split_group(members: list[int], segments: list[set[int]], lengths: list[int], budget: int) -> list[tuple[list[int], int]]:
    """Split a group into units of (rollouts, tokens), each within the budget unless a single rollout exceeds it.

    ``segments`` are those of each rollout of the batch, ``lengths`` those of each segment.
    """
    units: list[tuple[list[int], int]] = []
    seen: set[int] = set()
    for sequence in members:
        own = segments[sequence]
        fresh = sum(lengths[segment] for segment in own - seen)
        if units and units[-1][1] + fresh <= budget:
            units[-1] = (units[-1][0] + [sequence], units[-1][1] + fresh)
            seen |= own
        else:
            units.append(([sequence], sum(lengths[segment] for segment in own)))
            seen = set(own)
    return units


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
