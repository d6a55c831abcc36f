"""A column that only these tests declare is packed, cut and shared: nothing on the way names a column."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.data.packing import pack
from strop.data.shares import SplitRule, divide_batch
from strop.data.splitting import split_micro_batches, split_mini_batches
from strop.types import Batch, RolloutCredit, observation_turn
from support.columns import (
    BITS,
    PREDICTED,
    READ,
    STRANGERS,
    TURN,
    check_part,
    check_read,
    check_strangers,
    report,
    with_strangers,
)
from support.rollouts import GroupShape, batch_shapes, make_agent_groups, make_group, make_groups, make_rollout, sampled_turn

properties = settings(max_examples=60, deadline=None, derandomize=True)
silences = st.lists(st.integers(0, 5), max_size=3)


def owners(part: Batch, index: torch.Tensor, whole: Batch) -> list[int]:
    return whole.sequence[index].unique().tolist()


@properties
@given(shapes=batch_shapes, seed=st.integers(0, 3), silent=silences, share=st.booleans())
def test_packed_batches_have_what_was_reported(shapes: list[GroupShape], seed: int, silent: list[int], share: bool) -> None:
    groups = [with_strangers(group, silent) for group in make_groups(shapes, seed)]
    check_strangers(groups, pack(groups, share_prefixes=share))


@properties
@given(shapes=batch_shapes, silent=silences, budget=st.integers(1, 60), share=st.booleans())
def test_micro_batches_have_the_values_of_their_tokens(
    shapes: list[GroupShape], silent: list[int], budget: int, share: bool
) -> None:
    groups = [with_strangers(group, silent) for group in make_groups(shapes, 1)]
    whole = pack(groups, share_prefixes=share)
    for part in (*split_micro_batches(whole, budget), *split_mini_batches(whole, len(groups))):
        check_part(part.batch, part.index, whole, owners(part.batch, part.index, whole))
        if READ.name in part.batch.read_columns:
            check_read(part.batch, every=not silent)


@properties
@given(shapes=batch_shapes, silent=silences, budget=st.integers(1, 60), ranks=st.integers(1, 4))
def test_shares_of_ranks_have_the_values_of_their_tokens_after_they_travelled(
    shapes: list[GroupShape], silent: list[int], budget: int, ranks: int
) -> None:
    whole = pack([with_strangers(group, silent) for group in make_groups(shapes, 2)])
    seen = []
    for share in pickle.loads(pickle.dumps(divide_batch(whole, SplitRule(ranks=ranks, token_budget=budget)), protocol=5)):
        for part, _ in share.micro_batches():
            if part is not None:
                check_part(part.batch, part.index, whole, owners(part.batch, part.index, whole))
                seen += part.index.tolist()
    assert sorted(seen) == list(range(len(whole.target)))


def test_where_only_an_end_is_scored_there_is_nothing_of_predicted_tokens() -> None:
    groups = [with_strangers(group) for group in make_agent_groups()]
    ones = torch.ones(3, dtype=torch.float64)
    batch = pack(groups, RolloutCredit(rewards=ones, advantages=ones, mask=ones, predict="last_token"))
    assert not batch.columns and set(batch.read_columns) == {READ.name, BITS.name} and len(batch.rollout_columns) == 1


def test_a_later_turn_keeps_of_what_it_read_only_what_earlier_ones_lack() -> None:
    rollout = make_rollout([5, 6, 7])
    for answer in ((8, 9), (12, 13, 14)):
        said = report(rollout.tokens().tolist(), answer)
        rollout = rollout.with_turn(replace(sampled_turn(answer), columns=said)).with_turn(observation_turn([10, 11], ""))
    first, second = rollout.policy_turns
    assert [len(first.columns[each]) for each in (READ, PREDICTED, TURN)] == [3 + 1, 2, 1]
    assert [len(second.columns[each]) for each in (READ, PREDICTED, TURN)] == [1 + 2 + 2, 3, 1]
    check_read(pack([make_group(rollout)]), every=True)


def test_values_of_other_lengths_or_shapes_are_refused_by_the_name_of_the_column() -> None:
    turn = sampled_turn([8, 9])
    short = make_rollout([5], replace(turn, columns={PREDICTED: torch.zeros(1)}))
    with pytest.raises(ValueError, match=r"'stranger_predicted' \(predicted\) has 1 entries where there are 2"):
        pack([make_group(short)])
    wide = [make_rollout([5], replace(turn, columns={TURN: torch.zeros(1, width)})) for width in (2, 3)]
    with pytest.raises(ValueError, match=r"'stranger_turn' .* of different shapes, with entries of \[\(2,\), \(3,\)\]"):
        pack([make_group(*wide)])
    twice = replace(turn, columns={TURN: torch.zeros(1), replace(TURN, aligned="predicted"): torch.zeros(2)})
    with pytest.raises(ValueError, match="two of the columns of this batch have one name"):
        pack([make_group(make_rollout([5], twice))])
    batch = pack([make_group(make_rollout([5], turn))])
    for field, name in (
        ("columns", "tokens are predicted"),
        ("read_columns", "tokens are read"),
        ("rollout_columns", "rollouts"),
    ):
        with pytest.raises(ValueError, match=f"'odd' has 7 entries, but [0-9]+ {name}"):
            replace(batch, **{field: {"odd": torch.zeros(7)}})  # type: ignore[arg-type]


def test_a_declaration_is_the_same_in_another_process() -> None:
    for column in STRANGERS:
        assert pickle.loads(pickle.dumps(column)) == column
