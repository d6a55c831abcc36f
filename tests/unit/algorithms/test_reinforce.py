"""REINFORCE: no group, no ratio, no clip."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strop.algorithms.base import Plan
from strop.algorithms.policy_gradient.advantages.reinforce import REINFORCE, PlainReward, Reinforce
from strop.algorithms.policy_gradient.corrections.importance import Importance
from support.rollouts import make_group, make_rollout, pack_for, sampled_turn
from support.tokens import loss_gradients, make_group_rewards, make_step


def test_the_credit_is_the_reward() -> None:
    assert REINFORCE().advantage.rollout_advantages(make_group_rewards(0.25)).tolist() == [0.25]
    assert list(REINFORCE().validate(Plan(group_size=1))) == []


def test_the_slope_is_the_reward_whatever_the_policy_was() -> None:
    step = make_step([[-1.0, -2.0], [-3.0]], [0.5, 2.0], old=[[-9.0, -0.1], [-3.0]])
    loss, slope, logged = loss_gradients(REINFORCE(), step)
    assert slope == pytest.approx([-0.25, -0.25, -1.0])
    assert loss == pytest.approx(-(0.5 * -3.0 + 2.0 * -3.0) / 2)
    assert logged["probs_ratio_max"] > 1000


def test_the_mean_of_the_batch_can_be_the_baseline() -> None:
    groups = [
        make_group(make_rollout([5], sampled_turn([7] * length), reward=reward))
        for reward, length in ((1.0, 4), (0.0, 1), (0.2, 2))
    ]
    algorithm = REINFORCE(advantage=PlainReward(batch_mean=True))
    batch = algorithm.token_credit(pack_for(groups, algorithm))
    assert batch.advantages.tolist() == pytest.approx([0.6] * 4 + [-0.4] + [-0.2] * 2)


def test_a_batch_of_equal_rewards_earns_exactly_nothing_over_its_mean() -> None:
    groups = [make_group(make_rollout([5], sampled_turn([7]), reward=0.1)) for _ in range(7)]
    algorithm = REINFORCE(advantage=PlainReward(batch_mean=True))
    batch = algorithm.token_credit(pack_for(groups, algorithm))
    assert torch.equal(batch.advantages, torch.zeros(7))
    assert algorithm.zero_gradient(batch).all()


def test_older_samples_are_weighed_by_a_correction() -> None:
    step = make_step([[-1.0]], [1.0], old=[[-1.5]], rollout=[[-2.0]])
    _, slope, _ = loss_gradients(REINFORCE(corrections=(Importance(),)), step)
    assert slope == pytest.approx([-float(torch.tensor(0.5).exp())], rel=1e-6)


def test_asking_it_for_a_ratio_is_refused() -> None:
    for algorithm in (REINFORCE(on_policy_ratio=True), REINFORCE(ratio_to="sampler")):
        assert any("has no ratio" in problem for problem in algorithm.validate(Plan()))
    assert not Reinforce.uses_ratio_to
    assert list(replace(REINFORCE(), corrections=(Importance(),)).validate(Plan(max_staleness=3))) == []
