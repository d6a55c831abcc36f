"""RLOO: each rollout against the others of its group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.base import Plan
from strop.algorithms.policy_gradient.advantages.grpo import GroupRelative
from strop.algorithms.policy_gradient.advantages.rloo import RLOO, LeaveOneOut
from support.tokens import loss_gradients, make_group_rewards, make_step


def test_the_baseline_is_the_mean_of_the_others() -> None:
    assert LeaveOneOut().rollout_advantages(make_group_rewards(1.0, 0.0, 0.5)).tolist() == pytest.approx([0.75, -0.75, 0.0])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rewards=st.lists(st.integers(-50, 50).map(float), min_size=2, max_size=9))
def test_it_is_the_centred_reward_times_g_over_g_minus_one(rewards: list[float]) -> None:
    found = LeaveOneOut().rollout_advantages(make_group_rewards(*rewards))
    centred = GroupRelative(normalize=False).rollout_advantages(make_group_rewards(*rewards))
    assert torch.allclose(found, centred * len(rewards) / (len(rewards) - 1), rtol=1e-12, atol=1e-12)


def test_a_rollout_is_one_action() -> None:
    """Its log-probability is the sum over its tokens, and the loss the mean over rollouts."""
    loss, slope, _ = loss_gradients(RLOO(), make_step([[-1.0, -2.0], [-4.0]], [0.5, -0.5]))
    assert slope == pytest.approx([-0.25, -0.25, 0.25])
    assert loss == pytest.approx(-(0.5 * -3.0 - 0.5 * -4.0) / 2)


def test_nobody_is_left_out_of_a_group_of_one() -> None:
    assert any("group size is 1" in problem for problem in RLOO().validate(Plan(group_size=1)))
