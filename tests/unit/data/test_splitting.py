"""Batch -> parts: every predicted token stands in exactly one part and sees what it saw in the whole batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.data.rollout_selector import SubBatch
from strop.data.splitting import pack_first_fit, select_rollouts, split_micro_batches, split_mini_batches
from strop.types import Totals
from support.algorithms import grpo
from support.packed import described, expected
from support.rollouts import GroupShape, batch_shapes, make_groups, pack_for, simple_groups

properties = settings(max_examples=60, deadline=None, derandomize=True)


@properties
@given(shapes=batch_shapes, seed=st.integers(0, 3), budget=st.integers(1, 60), share=st.booleans(), padded=st.booleans())
def test_micro_batches_hold_every_token_once_with_its_history_and_the_whole_totals(
    shapes: list[GroupShape], seed: int, budget: int, share: bool, padded: bool
) -> None:
    batch = pack_for(make_groups(shapes, seed), grpo(overlong_filtering=True), share_prefixes=share)
    batch = batch.with_column("mark", torch.arange(len(batch.target)).float())
    whole = described(batch)
    parts = split_micro_batches(batch, budget, padded=padded)
    held = torch.cat([part.index for part in parts])
    assert sorted(held.tolist()) == list(range(len(batch.target)))
    for part in parts:
        assert part.batch.totals == batch.totals
        assert torch.equal(part.batch.columns["mark"], part.index.float())
        for column in ("target", "rollout_logprobs", "versions", "advantages", "mask"):
            assert torch.equal(getattr(part.batch, column), getattr(batch, column)[part.index])
        for own, place in zip(described(part.batch), part.index.tolist(), strict=True):
            assert (own[0], own[1], own[3]) == (whole[place][0], whole[place][1], whole[place][3])
        rewards = part.batch.rewards[part.batch.sequence]
        assert torch.equal(rewards, batch.rewards[batch.sequence[part.index]])
        assert _within(part, budget, padded)


def _within(part: SubBatch, budget: int, padded: bool) -> bool:
    """At most the budget is read, unless a single rollout is larger."""
    if part.batch.num_sequences == 1:
        return True
    read = part.batch.num_sequences * (int(part.batch.positions.max()) + 1) if padded else len(part.batch.tokens)
    return read <= budget


def test_a_batch_within_the_budget_is_one_part() -> None:
    batch = pack_for(simple_groups((4, (3, 3)), (5, (2, 8))), grpo())
    assert len(split_micro_batches(batch, len(batch.tokens))) == 1
    assert len(split_micro_batches(batch, len(batch.tokens) - 1)) == 2


def test_a_group_that_fits_is_not_cut_and_one_that_does_not_repeats_its_prompt() -> None:
    batch = pack_for(simple_groups((10, (5, 5, 5, 5))), grpo())
    assert len(batch.tokens) == 10 + 4 * 4, "the prompt once, and each completion without its last token"
    parts = split_micro_batches(batch, 18)
    assert [len(part.batch.tokens) for part in parts] == [18, 18]
    assert [part.batch.num_sequences for part in parts] == [2, 2]


def test_idle_groups_are_read_apart_from_those_with_a_gradient() -> None:
    batch = pack_for(simple_groups((4, (3, 3)), (4, (3, 3)), (4, (2,))), grpo())
    batch = replace(batch, zero_gradient=torch.tensor([False, False, True, True, True]))
    parts = split_micro_batches(batch, 1000)
    assert len(parts) == 2
    assert [part.batch.zero_gradient.tolist() for part in parts if part.batch.zero_gradient is not None] == [
        [False, False],
        [True, True, True],
    ]
    assert sorted(torch.cat([part.index for part in parts]).tolist()) == list(range(len(batch.target)))


def test_mini_batches_are_equal_counts_of_groups_in_order_with_totals_of_their_own() -> None:
    groups = simple_groups((4, (3, 1)), (2, (6,)), (3, (1, 2, 3)), (9, (5,)))
    batch = pack_for(groups, grpo())
    parts = split_mini_batches(batch, 2)
    assert torch.cat([part.index for part in parts]).tolist() == list(range(len(batch.target)))
    assert [part.batch.totals for part in parts] == [Totals(10, 3, 2), Totals(11, 4, 2)]
    assert [part.batch.num_groups for part in parts] == [2, 2]
    assert described(parts[0].batch) == expected(groups[:2])
    with pytest.raises(ValueError, match="4 groups cannot be split into 3 equal mini-batches"):
        split_mini_batches(batch, 3)


@properties
@given(shapes=batch_shapes, data=st.data())
def test_a_selection_of_a_selection_is_a_selection(shapes: list[GroupShape], data: st.DataObject) -> None:
    batch = pack_for(make_groups(shapes, 0), grpo())
    chosen = data.draw(st.lists(st.sampled_from(range(batch.num_sequences)), min_size=1, unique=True).map(sorted))
    again = data.draw(st.lists(st.sampled_from(range(len(chosen))), min_size=1, unique=True).map(sorted))
    twice = select_rollouts(select_rollouts(batch, chosen).batch, again)
    once = select_rollouts(batch, [chosen[place] for place in again])
    assert described(twice.batch) == described(once.batch)
    assert torch.equal(twice.batch.tokens, once.batch.tokens)


@properties
@given(sizes=st.lists(st.integers(0, 12), max_size=40), budget=st.integers(1, 10))
def test_units_go_into_the_first_bin_that_has_room_for_them(sizes: list[int], budget: int) -> None:
    bins: list[list[int]] = []
    for unit in sorted(range(len(sizes)), key=lambda unit: -sizes[unit]):
        fitting = [each for each in bins if sum(sizes[member] for member in each) + sizes[unit] <= budget]
        if fitting:
            fitting[0].append(unit)
        else:
            bins.append([unit])
    assert pack_first_fit([([unit], size) for unit, size in enumerate(sizes)], budget) == [sorted(each) for each in bins]
