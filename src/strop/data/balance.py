"""A batch over data ranks: who reads which rollouts, in which micro-batches. The same answer on every rank, from the batch alone.

Ranks meet in every layer of every micro-batch, to gather weights and to sum gradients. So each has the same number of micro-batches, and
those that run at the same time should be of one size: the slowest rank is waited for. Rollouts without a gradient are divided apart
from the others, for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from strop.data.packing import cut_group, first_fit, group_members
from strop.types import Batch

Unit = tuple[list[int], int]  # rollouts that stay together, and the tokens it takes to read them alone


@dataclass(frozen=True)
class RankPlan:
    """The micro-batches of one rank, each the rollouts it reads; () where the rank only keeps step with the others."""

    busy: tuple[tuple[int, ...], ...]
    idle: tuple[tuple[int, ...], ...]  # without a backward pass


@dataclass(frozen=True)
class Division:
    """Who reads what. All ranks have equally many micro-batches of either kind."""

    ranks: tuple[RankPlan, ...]
    tokens: tuple[int, ...]  # read by each rank
    smallest: int  # the rollout that costs least, for those who only keep step

    @property
    def max_over_mean(self) -> float:
        """What the fullest rank reads over what the ranks read on average: 1 is perfect."""
        return max(self.tokens) * len(self.tokens) / max(sum(self.tokens), 1)


def divide(batch: Batch, ranks: int, token_budget: int, *, padded: bool = False, whole_groups: bool = False) -> Division:
    """Divide a batch's rollouts over ``ranks``, in micro-batches of at most ``token_budget`` tokens wherever a unit fits in one.

    A unit is a group, or a piece of one that is larger than the budget or than an even share; always a group with ``whole_groups``.
    Units go, the largest first, to the rank that has least, so that none has more than the mean and one unit, counting each unit
    as it would be read alone. ``padded``: each rollout is a row as long as the longest of the batch, and costs that.
    """
    costs = _Costs(batch, padded)
    flags = [False] * batch.num_sequences if batch.idle is None else batch.idle.tolist()
    kinds = []
    for kind in (False, True):
        units = _units(batch, costs, ranks, token_budget, whole_groups)
        own = _spread([unit for unit in units if all(flags[sequence] for sequence in unit[0]) == kind], ranks)
        kinds.append(_in_step(own, token_budget, costs))
    plans = tuple(RankPlan(busy, idle) for busy, idle in zip(*kinds, strict=True))
    return Division(
        ranks=plans,
        tokens=tuple(sum(costs.together(part) for part in plan.busy + plan.idle) for plan in plans),
        smallest=min(range(batch.num_sequences), key=lambda sequence: costs.together([sequence])),
    )


class _Costs:
    """How many tokens it takes to read rollouts in one micro-batch, which share what they have in common."""

    def __init__(self, batch: Batch, padded: bool) -> None:
        self.lengths: list[int] = batch.segment_length.tolist()
        self.row = int(batch.positions.max()) + 1 if padded else None
        parents = batch.segment_parent.tolist()
        self.paths: list[list[int]] = []
        for leaf in batch.leaf.tolist():
            path = []
            while leaf != -1:
                path.append(leaf)
                leaf = parents[leaf]
            self.paths.append(path)

    def together(self, sequences: Sequence[int]) -> int:
        if self.row is not None:
            return self.row * len(sequences)
        return sum(self.lengths[segment] for segment in {part for one in sequences for part in self.paths[one]})


def _units(batch: Batch, costs: _Costs, ranks: int, token_budget: int, whole_groups: bool) -> list[Unit]:
    members = group_members(batch)
    groups = [(sequences, costs.together(sequences)) for sequences in members]
    if whole_groups:
        return groups
    if costs.row is not None:
        return [([sequence], costs.row) for sequences in members for sequence in sequences]
    limit = min(token_budget, -(-sum(size for _, size in groups) // ranks))
    return [unit for sequences, _ in groups for unit in cut_group(sequences, batch, costs.lengths, limit)]


def _spread(units: Iterable[Unit], bins: int) -> list[list[Unit]]:
    """The largest first, each to the bin that has least; earlier bins where they are equal."""
    held: list[list[Unit]] = [[] for _ in range(bins)]
    sizes = [0] * bins
    for unit in sorted(units, key=lambda unit: -unit[1]):
        place = min(range(bins), key=sizes.__getitem__)
        held[place].append(unit)
        sizes[place] += unit[1]
    return held


def _in_step(ranks: Sequence[Sequence[Unit]], token_budget: int, costs: _Costs) -> list[tuple[tuple[int, ...], ...]]:
    """The micro-batches of each rank, as many as the rank with most of them needs, the largest of every rank at the same time."""
    fewest = [first_fit(list(units), token_budget) for units in ranks]
    count = max(map(len, fewest))
    plans = []
    for units, packed in zip(ranks, fewest, strict=True):
        even = _spread(units, count)
        parts = [sorted(sequence for members, _ in held for sequence in members) for held in even]
        fits = (len(held) <= 1 or costs.together(part) <= token_budget for held, part in zip(even, parts, strict=True))
        chosen = parts if all(fits) else packed + [[]] * (count - len(packed))
        plans.append(tuple(sorted(map(tuple, chosen), key=costs.together, reverse=True)))
    return plans
