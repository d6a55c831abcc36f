"""Rewards -> credit against the papers' formulas in plain loops, on every group of ``cases.REWARDS``."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from conformance.advantages import GROUP_ADVANTAGES, GroupCase
from conformance.cases import REWARDS
from conformance.compose import part
from strop.algorithms.parts import GroupRewards

GROUP = pytest.mark.parametrize("rewards", REWARDS.values(), ids=REWARDS)
CASE = pytest.mark.parametrize("case", GROUP_ADVANTAGES, ids=str)


def lengths_of(rewards: Sequence[float], seed: int = 0) -> list[float]:
    draw = random.Random(f"{len(rewards)} {seed}")
    return [float(draw.choice([0, 1, 2, 9, 40])) for _ in rewards]


def credit(case: GroupCase, rewards: Sequence[float], lengths: Sequence[float], greedy: float = 0.5) -> list[float]:
    group = GroupRewards(
        rewards=torch.tensor(rewards, dtype=torch.float64), lengths=torch.tensor(lengths, dtype=torch.float64), greedy=greedy
    )
    found: list[float] = part(case.part, **case.options).relative(group).tolist()
    return found


@CASE
@GROUP
def test_credit_is_its_papers_formula(case: GroupCase, rewards: list[float]) -> None:
    lengths = lengths_of(rewards)
    wanted = case.formula(rewards, lengths, 0.5)
    assert credit(case, rewards, lengths) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@CASE
def test_credit_without_any_token_is_finite(case: GroupCase) -> None:
    assert all(map(_finite, credit(case, [1.0, 0.0, 0.5], [0.0, 0.0, 0.0])))


def _finite(number: float) -> bool:
    return number - number == 0


@pytest.mark.parametrize("case", [case for case in GROUP_ADVANTAGES if case.relative], ids=str)
@pytest.mark.parametrize("name", ["all right", "all wrong", "all the same, not representable", "float residue", "float32 residue"])
def test_a_group_that_does_not_vary_has_no_credit_at_all(case: GroupCase, name: str) -> None:
    rewards = REWARDS[name]
    assert credit(case, rewards, lengths_of(rewards)) == [0.0] * len(rewards)


rewards_of_groups = st.lists(st.integers(-8, 8).map(lambda eighths: eighths / 8), min_size=2, max_size=9)


@pytest.mark.parametrize("case", [case for case in GROUP_ADVANTAGES if case.shift], ids=str)
@given(rewards=rewards_of_groups, shift=st.integers(-16, 16))
def test_a_constant_added_to_all_rewards_changes_nothing(case: GroupCase, rewards: list[float], shift: int) -> None:
    lengths = lengths_of(rewards)
    moved = credit(case, [reward + shift for reward in rewards], lengths)
    assert moved == pytest.approx(credit(case, rewards, lengths), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("case", [case for case in GROUP_ADVANTAGES if case.scale is not None], ids=str)
@given(rewards=rewards_of_groups, scale=st.sampled_from([0.25, 3.0, 1000.0]))
def test_a_factor_on_all_rewards_goes_where_it_should(case: GroupCase, rewards: list[float], scale: float) -> None:
    lengths = lengths_of(rewards)
    scaled = credit(case, [scale * reward for reward in rewards], lengths)
    plain = credit(case, rewards, lengths)
    factor = scale if case.scale == "follows" else 1.0
    assert scaled == pytest.approx([factor * advantage for advantage in plain], rel=1e-4, abs=1e-6)  # eps beside the deviation


@pytest.mark.parametrize("case", [case for case in GROUP_ADVANTAGES if case.zero_sum], ids=str)
@given(rewards=rewards_of_groups)
def test_the_credit_of_a_group_sums_to_zero(case: GroupCase, rewards: list[float]) -> None:
    assert sum(credit(case, rewards, lengths_of(rewards))) == pytest.approx(0.0, abs=1e-6)


@CASE
@given(rewards=rewards_of_groups, seed=st.integers(0, 100))
def test_rollouts_can_come_in_any_order(case: GroupCase, rewards: list[float], seed: int) -> None:
    lengths = lengths_of(rewards)
    order = list(range(len(rewards)))
    random.Random(seed).shuffle(order)
    moved = credit(case, [rewards[i] for i in order], [lengths[i] for i in order])
    plain = credit(case, rewards, lengths)
    assert moved == pytest.approx([plain[i] for i in order], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("case", [case for case in GROUP_ADVANTAGES if case.monotone], ids=str)
@given(rewards=rewards_of_groups)
def test_a_better_rollout_never_has_less_credit(case: GroupCase, rewards: list[float]) -> None:
    assume(len(set(rewards)) > 1)
    ranked = sorted(zip(rewards, credit(case, rewards, lengths_of(rewards)), strict=True))
    assert all(later[1] >= earlier[1] - 1e-12 for earlier, later in zip(ranked, ranked[1:], strict=False))


def test_a_lone_success_in_16_has_its_due() -> None:
    """(1 - 1/16) / std = sqrt(15): dividing by a leave-one-out deviation would give it 1."""
    alone = credit(GroupCase("group_relative", lambda *_: []), REWARDS["a lone success in 16"], [1.0] * 16)
    assert alone[0] == pytest.approx(15**0.5, rel=1e-5)
    assert alone[1:] == pytest.approx([-(15**-0.5)] * 15, rel=1e-5)


Formula = Callable[..., Any]
