"""Groups -> batch -> parts: every predicted token stands in exactly one part and sees what it saw in its rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.data.splitting import SubBatch, select_rollouts, split_micro_batches, split_mini_batches
from strop.sampling import KEPT_TOKENS, pad_kept_tokens
from strop.types import Batch, Group, Totals, Turn, observation_turn
from support.algorithms import grpo
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


def history(batch: Batch, predicted: int) -> list[int]:
    """The tokens that the network has read when it predicts token ``predicted``, by the batch's own structure."""
    source = int(batch.source[predicted])
    segment = int((batch.segment_start <= source).nonzero().max())
    while int(batch.segment_length[segment]) == 0:
        segment -= 1  # empty segments share their start with the next one
    start = int(batch.segment_start[segment])
    tokens = batch.tokens[start : source + 1].tolist()
    segment = int(batch.segment_parent[segment])
    while segment != -1:
        start = int(batch.segment_start[segment])
        tokens = batch.tokens[start : start + int(batch.segment_length[segment])].tolist() + tokens
        segment = int(batch.segment_parent[segment])
    return tokens


def expected(groups: Sequence[Group]) -> list[tuple[list[int], int, int, float]]:
    """(history, target, place of the rollout, sampler log-probability) of every sampled token, straight from the rollouts."""
    found = []
    place = 0
    for group in groups:
        for rollout in group.rollouts:
            tokens = rollout.tokens().tolist()
            position = len(rollout.prompt)
            for turn in rollout.turns:
                for offset, logprob in enumerate(turn.logprobs.tolist()):
                    if turn.sampled:
                        found.append((tokens[: position + offset], tokens[position + offset], place, logprob))
                position += len(turn.tokens)
            place += 1
    return found


def described(batch: Batch) -> list[tuple[list[int], int, int, float]]:
    return [
        (history(batch, place), int(batch.target[place]), int(batch.sequence[place]), float(batch.rollout_logprobs[place]))
        for place in range(len(batch.target))
    ]


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


@properties
@given(shapes=batch_shapes, budget=st.integers(1, 60))
def test_cutting_is_repeatable(shapes: list[GroupShape], budget: int) -> None:
    batch = pack_for(make_groups(shapes, 0), grpo())
    first, again = (split_micro_batches(batch, budget) for _ in range(2))
    assert [part.index.tolist() for part in first] == [part.index.tolist() for part in again]


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


def test_a_prompt_is_read_once_a_group() -> None:
    groups = simple_groups((50, (3, 3, 3)))
    assert len(pack_for(groups, grpo()).tokens) == 56
    assert len(pack_for(groups, grpo(), share_prefixes=False).tokens) == 156


def test_idle_groups_are_read_apart_from_those_with_a_gradient() -> None:
    from dataclasses import replace

    batch = pack_for(simple_groups((4, (3, 3)), (4, (3, 3)), (4, (2,))), grpo())
    batch = replace(batch, zero_gradient=torch.tensor([False, False, True, True, True]))
    parts = split_micro_batches(batch, 1000)
    assert len(parts) == 2
    assert [part.batch.zero_gradient.tolist() for part in parts if part.batch.zero_gradient is not None] == [
        [False, False],
        [True, True, True],
    ]
    assert sorted(torch.cat([part.index for part in parts]).tolist()) == list(range(len(batch.target)))


def test_tokens_after_the_last_sampled_one_are_not_read() -> None:
    rollout = make_rollout([5, 6], sampled_turn([7, 8]))
    batch = pack_for([make_group(rollout)], grpo())
    assert batch.tokens.tolist() == [5, 6, 7]


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


def test_a_batch_of_empty_rollouts_is_refused() -> None:
    with pytest.raises(ValueError, match="all rollouts are empty"):
        pack_for([make_group(make_rollout([4, 5]))], grpo())


def recording(*sets: Sequence[int]) -> Turn:
    """A turn of the first token of each set, drawn from that set."""
    return replace(sampled_turn([row[0] for row in sets]), kept=pad_kept_tokens([torch.tensor(row) for row in sets]))


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
