"""OPO: the baseline of least variance."""

from __future__ import annotations

import pytest

from strop.algorithms.base import Plan
from strop.algorithms.policy_gradient.advantages.opo import OPO, LengthWeighted
from support.tokens import make_group_rewards


def test_the_baseline_weighs_rewards_by_length() -> None:
    found = LengthWeighted().rollout_advantages(make_group_rewards(1.0, 0.0, 0.5, lengths=[1, 2, 7]))
    baseline = (1.0 + 3.5) / 10
    assert found.tolist() == pytest.approx([1 - baseline, -baseline, 0.5 - baseline])


def test_it_minimises_the_variance_of_a_gradient_whose_square_is_the_length() -> None:
    """sum l (R - b)^2 over b, by a fine grid."""
    rewards, lengths = [1.0, 0.0, 0.3], [5, 11, 2]
    found = 1.0 - float(LengthWeighted().rollout_advantages(make_group_rewards(*rewards, lengths=lengths))[0])
    cost = {
        b: sum(length * (reward - b / 1000) ** 2 for reward, length in zip(rewards, lengths, strict=True)) for b in range(1001)
    }
    assert found == pytest.approx(min(cost, key=cost.__getitem__) / 1000, abs=1e-3)


def test_groups_without_signal_or_tokens_earn_exactly_nothing() -> None:
    assert LengthWeighted().rollout_advantages(make_group_rewards(0.3, 0.1 + 0.2, lengths=[3, 9])).tolist() == [0.0, 0.0]
    assert LengthWeighted().rollout_advantages(make_group_rewards(1.0, 0.0, lengths=[0, 0])).tolist() == [0.0, 0.0]


def test_an_empty_rollout_does_not_move_the_baseline() -> None:
    assert LengthWeighted().rollout_advantages(make_group_rewards(1.0, 0.0, lengths=[0, 4])).tolist() == [1.0, 0.0]


def test_it_needs_groups() -> None:
    assert len(list(OPO().validate(Plan(group_size=1)))) == 1
