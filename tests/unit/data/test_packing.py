"""Groups -> batch: every predicted token sees what it saw in its rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.data.packing import pack
from strop.data.splitting import split_micro_batches, split_mini_batches
from strop.sampling import KEPT, KEPT_TOKENS, pad_kept_tokens
from strop.types import RolloutCredit, Totals, Turn, observation_turn
from support.algorithms import grpo
from support.packed import described, expected, history
from support.rollouts import (
    GroupShape,
    batch_shapes,
    make_group,
    make_groups,
    make_rollout,
    pack_for,
    sampled_turn,
    simple_groups,
)

properties = settings(max_examples=60, deadline=None, derandomize=True)


@properties
@given(shapes=batch_shapes, seed=st.integers(0, 3), share=st.booleans())
def test_every_sampled_token_is_predicted_once_after_exactly_its_own_history(
    shapes: list[GroupShape], seed: int, share: bool
) -> None:
    groups = make_groups(shapes, seed)
    batch = pack_for(groups, grpo(), share_prefixes=share)
    assert described(batch) == expected(groups)
    for place in range(len(batch.target)):
        assert int(batch.positions[batch.source[place]]) == len(history(batch, place)) - 1, "positions continue from the parent"
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert batch.rewards.tolist() == [rollout.reward for rollout in rollouts]
    assert batch.totals == Totals(len(batch.target), len(rollouts), len(groups))
    assert int(batch.segment_length.sum()) == len(batch.tokens)


def test_a_prompt_is_read_once_a_group() -> None:
    groups = simple_groups((50, (3, 3, 3)))
    assert len(pack_for(groups, grpo()).tokens) == 56
    assert len(pack_for(groups, grpo(), share_prefixes=False).tokens) == 156


def test_a_batch_of_empty_rollouts_is_refused() -> None:
    with pytest.raises(ValueError, match="all rollouts are empty"):
        pack_for([make_group(make_rollout([4, 5]))], grpo())


def recording(*sets: Sequence[int]) -> Turn:
    """A turn of the first token of each set, drawn from that set."""
    return replace(sampled_turn([row[0] for row in sets]), columns={KEPT: pad_kept_tokens([torch.tensor(row) for row in sets])})


def test_what_each_token_was_drawn_from_is_a_column_as_wide_as_the_largest_set() -> None:
    first = make_rollout([5, 6], recording([7], [8, 9]), observation_turn([1, 2], ""), recording([10, 11, 12]))
    second = make_rollout([5, 6], recording([13, 14]))
    empty = make_rollout([5, 6])
    batch = pack_for([make_group(first, second, empty), make_group(make_rollout([4], recording([20, 21, 22])), index=1)], grpo())
    wanted = [[7, -1, -1], [8, 9, -1], [10, 11, 12], [13, 14, -1], [20, 21, 22]]
    assert batch.column(KEPT_TOKENS).dtype == torch.int32
    assert batch.column(KEPT_TOKENS).tolist() == wanted
    assert batch.target.tolist() == [row[0] for row in wanted]
    for part in [*split_micro_batches(batch, 4), *split_mini_batches(batch, 2)]:
        assert part.batch.column(KEPT_TOKENS).tolist() == [wanted[place] for place in part.index.tolist()]


def test_without_recorded_sets_there_is_no_such_column() -> None:
    assert KEPT_TOKENS not in pack_for(simple_groups((4, (3, 2))), grpo()).columns


def test_turns_sampled_with_and_without_recording_do_not_go_into_one_batch() -> None:
    group = make_group(make_rollout([5, 6], recording([7, 8])), make_rollout([5, 6], sampled_turn([7])))
    with pytest.raises(ValueError, match=r"1 of the 2 turns .*keep_sampling_mask of the run's beginning"):
        pack_for([group], grpo())


def test_a_token_that_its_own_set_lacks_is_refused() -> None:
    wrong = replace(recording([7, 8], [9]), tokens=torch.tensor([7, 8]))
    with pytest.raises(ValueError, match="not among the recorded tokens that it was sampled from"):
        pack_for([make_group(make_rollout([5], wrong))], grpo())


def test_columns_of_the_wrong_length_and_missing_columns_are_named() -> None:
    batch = pack_for(simple_groups((4, (3,))), grpo())
    with pytest.raises(ValueError, match="'short' has 2 entries, but 3 tokens are predicted"):
        batch.with_column("short", torch.zeros(2))
    with pytest.raises(KeyError, match="no column 'values'; it has \\['known'\\]"):
        batch.with_column("known", torch.zeros(3)).column("values")


def test_the_credit_of_a_rollout_is_that_of_all_its_tokens() -> None:
    groups = simple_groups((4, (3, 1)), (2, (2,)))
    credit = RolloutCredit(
        rewards=torch.tensor([0.5, 0.25, 1.0], dtype=torch.float64),
        advantages=torch.tensor([1.0, -2.0, 0.1], dtype=torch.float64),
        mask=torch.tensor([True, False, True]),
    )
    batch = pack(groups, credit)
    assert batch.rewards.tolist() == [0.5, 0.25, 1.0]
    assert torch.equal(batch.advantages, torch.tensor([1.0, 1.0, 1.0, -2.0, 0.1, 0.1]))
    assert batch.mask.tolist() == [1, 1, 1, 0, 1, 1] and batch.totals == Totals(5, 2, 2)


def test_a_batch_that_is_only_scored_needs_no_credit() -> None:
    groups = simple_groups((4, (3, 1)), (2, (2,)))
    batch = pack(groups)
    assert torch.equal(batch.target, pack_for(groups, grpo()).target)
    assert not batch.advantages.any() and batch.mask.all()


def test_the_credit_of_other_groups_is_refused() -> None:
    credit = grpo().group_credit(simple_groups((4, (3, 1))))
    with pytest.raises(ValueError, match="the credit of 2 rollouts, not of 3: pass the same groups"):
        pack(simple_groups((4, (3, 1, 2))), credit)
