"""Who reads which rollouts of a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.data.splitting import BatchPartition, partition_batch, select_rollouts, split_micro_batches
from strop.types import Batch
from support.rollouts import GroupShape, batch_shapes, make_groups, pack_grpo, simple_groups


def all_parts(division: BatchPartition) -> list[tuple[int, ...]]:
    return [part for plan in division.ranks for part in (*plan.trained, *plan.forward_only)]


def with_idle(batch: Batch, seed: int) -> Batch:
    chosen = torch.rand(batch.num_sequences, generator=torch.Generator().manual_seed(seed)) < 0.4
    return replace(batch, zero_gradient=chosen) if seed else batch


@settings(max_examples=60, deadline=None)
@given(
    shapes=batch_shapes,
    ranks=st.integers(1, 5),
    budget=st.integers(1, 60),
    padded=st.booleans(),
    whole=st.booleans(),
    idle=st.integers(0, 3),
)
def test_every_rollout_is_read_once_and_all_ranks_keep_step(
    shapes: list[GroupShape], ranks: int, budget: int, padded: bool, whole: bool, idle: int
) -> None:
    batch = with_idle(pack_grpo(make_groups(shapes, 0)), idle)
    division = partition_batch(batch, ranks, budget, padded=padded, whole_groups=whole)
    assert sorted(sequence for part in all_parts(division) for sequence in part) == list(range(batch.num_sequences))
    assert len({len(plan.trained) for plan in division.ranks}) == len({len(plan.forward_only) for plan in division.ranks}) == 1
    assert division == partition_batch(batch, ranks, budget, padded=padded, whole_groups=whole), "the same on every rank"
    for part in filter(None, all_parts(division)):
        groups = set(batch.group[list(part)].tolist())
        if whole:
            assert all((batch.group == group).sum() == (batch.group[list(part)] == group).sum() for group in groups)
        if not padded:
            size = len(select_rollouts(batch, part).batch.tokens)
            assert size <= budget or len(part) == 1 or (whole and len(groups) == 1)
    if batch.zero_gradient is not None:
        for plan in division.ranks:
            assert all(batch.zero_gradient[list(part)].all() for part in plan.forward_only if part)
            assert not any(batch.zero_gradient[list(part)].all() for part in plan.trained if part)


@settings(max_examples=60, deadline=None)
@given(shapes=batch_shapes, ranks=st.integers(1, 5), budget=st.integers(1, 60), padded=st.booleans())
def test_no_rank_reads_more_than_an_even_share_and_one_unit(
    shapes: list[GroupShape], ranks: int, budget: int, padded: bool
) -> None:
    """The bound of handing things out largest first: the fullest rank got its last unit when it had the least."""
    batch = pack_grpo(make_groups(shapes, 0), share_prefixes=False)  # nothing is shared: pieces cost what they cost alone
    division = partition_batch(batch, ranks, budget, padded=padded)
    longest = int(batch.positions.max()) + 1
    total = sum(division.tokens_per_rank)
    rows = batch.rollout_paths()
    lengths = batch.segment_length.tolist()
    largest_rollout = max(len(paths) * longest if padded else sum(lengths[path[-1]] for path in paths) for paths in rows)
    unit = max(largest_rollout, 0 if padded else min(budget, -(-total // ranks)))
    assert max(division.tokens_per_rank) <= total / ranks + unit * (1 - 1 / ranks) + 1e-9
    assert division.max_over_mean == pytest.approx(max(division.tokens_per_rank) * ranks / total)


def test_one_large_group_is_cut_so_that_every_rank_has_some_of_it() -> None:
    batch = pack_grpo(simple_groups((4, (6,) * 8)))
    division = partition_batch(batch, 4, 1000)
    assert [len(plan.trained) for plan in division.ranks] == [1] * 4
    assert [len(plan.trained[0]) for plan in division.ranks] == [2] * 4
    assert division.max_over_mean == 1


def test_the_ranks_that_have_less_to_read_only_keep_step() -> None:
    batch = pack_grpo(simple_groups((4, (6, 2)), (3, (5, 5))))
    division = partition_batch(batch, 3, 9, whole_groups=True)
    assert [plan.trained for plan in division.ranks] == [((0, 1),), ((2, 3),), ((),)] or [
        plan.trained for plan in division.ranks
    ] == [((2, 3),), ((0, 1),), ((),)]
    assert division.dummy_sequence == 1, "a rollout that costs least stands in"


def test_micro_batches_of_a_rank_are_even() -> None:
    batch = pack_grpo(simple_groups(*[(1, (length,)) for length in (9, 9, 2, 2)]))
    (plan,) = partition_batch(batch, 1, 14).ranks
    assert sorted(sum(int(batch.segment_length[batch.leaf[one]]) + 1 for one in part) for part in plan.trained) == [11, 11]
    assert len(plan.trained) == len(split_micro_batches(batch, 14))
