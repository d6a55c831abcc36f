"""One place per rollout, at its last token; and pairs as the packer meets them: one a prefix of the other, empty, with two prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.data.splitting import select_rollouts, split_micro_batches
from strop.extensions.recorded.preference.referenced import DPO
from strop.extensions.recorded.supervised import RewardModel
from strop.types import Batch, Group, Rollout, observation_turn
from support.recorded import pair_shapes, recorded_group, recorded_turn, with_prompt
from support.rollouts import GroupShape, batch_shapes, make_group, make_groups, make_rollout, pack_for

properties = settings(max_examples=60, deadline=None, derandomize=True)
ENDS = RewardModel(kind="regression")


def history(batch: Batch, place: int) -> list[int]:
    """The tokens read up to and including flat index ``place``, by the batch's own structure."""
    ends = (batch.segment_start + batch.segment_length).tolist()
    segment = next(index for index, end in enumerate(ends) if batch.segment_start[index] <= place < end)
    tokens = batch.tokens[int(batch.segment_start[segment]) : place + 1].tolist()
    while (segment := int(batch.segment_parent[segment])) != -1:
        tokens = batch.tokens[int(batch.segment_start[segment]) : ends[segment]].tolist() + tokens
    return tokens


def up_to_the_last_sampled(rollout: Rollout) -> list[int]:
    turns = list(rollout.turns)
    while turns and not turns[-1].sampled:
        turns.pop()
    return replace(rollout, turns=tuple(turns)).tokens().tolist()


def described(batch: Batch) -> list[tuple[list[int], int, int]]:
    return [
        (history(batch, int(batch.source[place])), int(batch.target[place]), int(batch.sequence[place]))
        for place in range(len(batch.target))
    ]


def expected(groups: Sequence[Group]) -> list[tuple[list[int], int, int]]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    read = [up_to_the_last_sampled(rollout) for rollout in rollouts]
    return [(tokens, tokens[-1], place) for place, tokens in enumerate(read)]


@properties
@given(shapes=batch_shapes, seed=st.integers(0, 3), share=st.booleans())
def test_each_rollout_has_one_place_that_has_read_it_whole(shapes: list[GroupShape], seed: int, share: bool) -> None:
    groups = make_groups(shapes, seed)
    batch = pack_for(groups, ENDS, share_prefixes=share)
    assert described(batch) == expected(groups)
    assert batch.totals.tokens == batch.totals.sequences == batch.num_sequences == len(batch.target)
    assert batch.totals.groups == len(groups)
    for place, (tokens, _, _) in enumerate(expected(groups)):
        assert int(batch.positions[batch.source[place]]) == len(tokens) - 1


@properties
@given(shapes=batch_shapes, budget=st.integers(1, 60), share=st.booleans(), padded=st.booleans())
def test_parts_of_a_batch_of_ends_hold_every_rollout_once(
    shapes: list[GroupShape], budget: int, share: bool, padded: bool
) -> None:
    batch = pack_for(make_groups(shapes, 0), ENDS, share_prefixes=share)
    whole = described(batch)
    parts = split_micro_batches(batch, budget, padded=padded, whole_groups=True)
    held = torch.cat([part.index for part in parts])
    assert sorted(held.tolist()) == list(range(batch.num_sequences))
    for part in parts:
        own = described(part.batch)
        assert [tokens for tokens, _, _ in own] == [whole[place][0] for place in part.index.tolist()]
        assert torch.equal(part.batch.rewards, batch.rewards[part.index])


@properties
@given(shapes=pair_shapes, budget=st.integers(1, 60), share=st.booleans(), padded=st.booleans(), ends=st.booleans())
def test_whole_groups_are_never_cut(shapes: list[GroupShape], budget: int, share: bool, padded: bool, ends: bool) -> None:
    algorithm = RewardModel() if ends else DPO()
    batch = pack_for(make_groups(shapes, 1), algorithm, share_prefixes=share)
    parts = split_micro_batches(batch, budget, padded=padded, whole_groups=True)
    longest = int(batch.positions.max()) + 1
    assert sorted(torch.cat([part.index for part in parts]).tolist()) == list(range(len(batch.target)))
    for part in parts:
        group = part.batch.group
        assert torch.equal(group[0::2], group[1::2])
        read = part.batch.num_sequences * longest if padded else len(part.batch.tokens)
        assert read <= budget or part.batch.num_groups == 1
        assert part.batch.totals == batch.totals


def test_what_comes_after_the_last_sampled_token_is_not_read() -> None:
    rollout = make_rollout([5, 6], recorded_turn([7, 8]), observation_turn([9, 10], ""))
    batch = pack_for([make_group(rollout, rollout)], RewardModel())
    assert batch.tokens.tolist() == [5, 6, 7, 8, 7, 8]
    assert batch.source.tolist() == [3, 5]
    between = make_rollout([5, 6], recorded_turn([7]), observation_turn([9], ""), recorded_turn([8]))
    assert pack_for([make_group(between)], ENDS).tokens.tolist() == [5, 6, 7, 9, 8]


@pytest.mark.parametrize("share", [False, True])
def test_a_rollout_without_a_sampled_token_is_scored_at_the_end_of_its_prompt(share: bool) -> None:
    group = recorded_group([5, 6], [], [7])
    unheard = replace(group, rollouts=(*group.rollouts, make_rollout([5, 6], observation_turn([9], ""))))
    for found, ends in ((group, [[5, 6], [5, 6, 7]]), (unheard, [[5, 6], [5, 6, 7], [5, 6]])):
        batch = pack_for([recorded_group([3], [4], [4, 4]), found], ENDS, share_prefixes=share)
        assert [tokens for tokens, _, _ in described(batch)][2:] == ends
        assert batch.versions.dtype == torch.int32
        part = select_rollouts(batch, list(range(2, batch.num_sequences)))
        assert [tokens for tokens, _, _ in described(part.batch)] == ends


def test_a_rollout_without_any_token_is_refused() -> None:
    with pytest.raises(ValueError, match="a rollout of task data:0 has no tokens"):
        pack_for([recorded_group([], [], [5])], RewardModel())


def test_a_completion_that_begins_with_the_other_is_a_segment_of_its_own() -> None:
    group = recorded_group([5, 6], [7, 8], [7, 8, 9])
    batch = pack_for([group], DPO())
    assert batch.tokens.tolist() == [5, 6, 7, 7, 8], "the prompt once, and what is read of either completion"
    assert batch.segment_parent.tolist() == [-1, 0, 0]
    assert batch.target.tolist() == [7, 8, 7, 8, 9]
    assert [history(batch, int(place)) for place in batch.source] == [[5, 6], [5, 6, 7], [5, 6], [5, 6, 7], [5, 6, 7, 8]]
    ends = pack_for([group], RewardModel())
    assert ends.tokens.tolist() == [5, 6, 7, 8, 7, 8, 9]
    assert described(ends) == [([5, 6, 7, 8], 8, 0), ([5, 6, 7, 8, 9], 9, 1)]


@pytest.mark.parametrize("algorithm", [DPO(), RewardModel()])
def test_a_pair_with_two_prompts_shares_nothing(algorithm: DPO | RewardModel) -> None:
    group = recorded_group([5, 6], [7, 8], [9])
    chosen, rejected = group.rollouts
    group = replace(group, rollouts=(chosen, with_prompt(rejected, [5, 4, 6])))
    batch = pack_for([group], algorithm)
    assert batch.segment_parent.tolist() == [-1, -1]
    histories = [history(batch, int(place)) for place in batch.source]
    wanted = [[5, 6], [5, 6, 7], [5, 4, 6]] if isinstance(algorithm, DPO) else [[5, 6, 7, 8], [5, 4, 6, 9]]
    assert histories == wanted


@pytest.mark.parametrize("share", [False, True])
def test_an_empty_completion_of_a_pair_predicts_nothing(share: bool) -> None:
    batch = pack_for([recorded_group([5, 6], [7, 8], []), recorded_group([9], [], [10], index=1)], DPO(), share_prefixes=share)
    assert batch.target.tolist() == [7, 8, 10]
    assert batch.sequence.tolist() == [0, 0, 3]
    assert batch.versions.dtype == torch.int32
    assert (batch.totals.tokens, batch.totals.sequences, batch.totals.groups) == (3, 2, 2)
    for part in split_micro_batches(batch, 1, whole_groups=True):
        assert part.batch.num_sequences == 2
