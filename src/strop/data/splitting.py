"""Split a batch into mini-batches and micro-batches, without changing the context of any token (law 1).

Every rollout stays whole, and a micro-batch keeps the totals of its optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence

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
