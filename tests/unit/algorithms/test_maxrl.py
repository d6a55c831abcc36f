"""MaxRL: the gradient of the log of the success rate."""

from __future__ import annotations

from math import comb

import pytest

from strop.algorithms.base import Plan
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.advantages.maxrl import MaxRL, SuccessRate
from strop.algorithms.policy_gradient.overlong import SoftOverlong
from support.tokens import make_group_rewards


def test_credit_is_the_reward_over_the_mean_minus_one() -> None:
    assert SuccessRate().rollout_advantages(make_group_rewards(1.0, 0.0, 0.0, 0.0)).tolist() == [3.0, -1.0, -1.0, -1.0]
    assert SuccessRate().rollout_advantages(make_group_rewards(1.0, 1.0, 1.0, 0.0)).tolist() == pytest.approx(
        [1 / 3, 1 / 3, 1 / 3, -1.0]
    )


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-12])
def test_groups_without_a_success_or_a_failure_earn_exactly_nothing(value: float) -> None:
    assert SuccessRate().rollout_advantages(make_group_rewards(*[value] * 5)).tolist() == [0.0] * 5


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_its_expectation_is_the_gradient_of_the_truncated_log_likelihood(size: int, rate: float) -> None:
    """A policy that succeeds with chance p = sigmoid(theta): every outcome counted by its chance. d p / d theta = p (1 - p)."""
    expected = 0.0
    for successes in range(size + 1):
        rewards = [1.0] * successes + [0.0] * (size - successes)
        credit = SuccessRate().rollout_advantages(make_group_rewards(*rewards)).tolist()
        score = [1 - rate] * successes + [-rate] * (size - successes)
        mean = sum(a * b for a, b in zip(credit, score, strict=True)) / size
        expected += comb(size, successes) * rate**successes * (1 - rate) ** (size - successes) * mean
    wanted = sum((1 - rate) ** (k - 1) for k in range(1, size)) * rate * (1 - rate)
    assert expected == pytest.approx(wanted, rel=1e-12)


def test_negative_rewards_are_refused_where_they_come_from() -> None:
    with pytest.raises(ValueError, match="reward_scaling"):
        SuccessRate().rollout_advantages(make_group_rewards(1.0, -1.0))
    plan = Plan(group_size=4)
    assert any("SoftOverlong" in problem for problem in MaxRL(shaping=SoftOverlong()).validate(plan))
    assert any("KL term" in problem for problem in MaxRL(kl=Kl(place="reward")).validate(plan))
    assert list(MaxRL(kl=Kl(place="loss")).validate(plan)) == []
