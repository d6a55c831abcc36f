"""Dr. GRPO: no division by the deviation, none by a rollout's own length."""

from __future__ import annotations

import pytest
import torch

from strop.algorithms.base import Plan
from strop.algorithms.policy_gradient.advantages.dr_grpo import DrGRPO
from support.tokens import loss_gradients, make_group_rewards, make_step


def test_the_credit_is_the_distance_from_the_mean() -> None:
    assert DrGRPO().advantage.rollout_advantages(make_group_rewards(1.0, 0.0, 0.0, 0.0)).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_a_token_weighs_the_same_in_a_long_rollout_and_in_a_short_one() -> None:
    step = make_step([[-1.0], [-1.0, -2.0, -3.0]], [0.5, -0.5])
    loss, slope, _ = loss_gradients(DrGRPO(constant_length=10), step)
    assert slope == pytest.approx([-0.5 / 20, *[0.5 / 20] * 3])
    assert loss == pytest.approx(-(0.5 - 3 * 0.5) / 20)


def test_the_length_must_be_set() -> None:
    assert ["constant_length" in problem for problem in DrGRPO().validate(Plan(group_size=4))] == [True]
    assert list(DrGRPO(constant_length=64).validate(Plan(group_size=4))) == []


def test_a_group_that_does_not_vary_earns_exactly_nothing() -> None:
    assert torch.equal(
        DrGRPO().advantage.rollout_advantages(make_group_rewards(0.1 + 0.2, 0.3, 0.3)), torch.zeros(3, dtype=torch.float64)
    )
