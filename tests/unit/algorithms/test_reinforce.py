"""REINFORCE: no group, no ratio, no clip."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strop.algorithms.base import Plan
from strop.algorithms.importance import Importance
from strop.algorithms.reinforce import REINFORCE, PlainReward, Reinforce
from strop.data.packing import pack
from support.rollouts import group_of, rollout_of, sampled
from support.tokens import group, slopes, step_of


def test_the_credit_is_the_reward() -> None:
    assert REINFORCE().advantage.relative(group(0.25)).tolist() == [0.25]
    assert list(REINFORCE().problems(Plan(group_size=1))) == []


def test_the_slope_is_the_reward_whatever_the_policy_was() -> None:
    step = step_of([[-1.0, -2.0], [-3.0]], [0.5, 2.0], before=[[-9.0, -0.1], [-3.0]])
    loss, slope, logged = slopes(REINFORCE(), step)
    assert slope == pytest.approx([-0.25, -0.25, -1.0])
    assert loss == pytest.approx(-(0.5 * -3.0 + 2.0 * -3.0) / 2)
    assert logged["probs_ratio_max"] > 1000


def test_the_mean_of_the_batch_can_be_the_baseline() -> None:
    groups = [
        group_of(rollout_of([5], sampled([7] * length), reward=reward)) for reward, length in ((1.0, 4), (0.0, 1), (0.2, 2))
    ]
    algorithm = REINFORCE(advantage=PlainReward(batch_mean=True))
    batch = algorithm.credit(pack(groups, algorithm))
    assert batch.advantages.tolist() == pytest.approx([0.6] * 4 + [-0.4] + [-0.2] * 2)


def test_a_batch_of_equal_rewards_earns_exactly_nothing_over_its_mean() -> None:
    groups = [group_of(rollout_of([5], sampled([7]), reward=0.1)) for _ in range(7)]
    algorithm = REINFORCE(advantage=PlainReward(batch_mean=True))
    batch = algorithm.credit(pack(groups, algorithm))
    assert torch.equal(batch.advantages, torch.zeros(7))
    assert algorithm.idle(batch).all()


def test_older_samples_are_weighed_by_a_correction() -> None:
    step = step_of([[-1.0]], [1.0], before=[[-1.5]], sampler=[[-2.0]])
    _, slope, _ = slopes(REINFORCE(corrections=(Importance(),)), step)
    assert slope == pytest.approx([-float(torch.tensor(0.5).exp())], rel=1e-6)


def test_asking_it_for_a_ratio_is_refused() -> None:
    for algorithm in (REINFORCE(on_policy_ratio=True), REINFORCE(ratio_to="sampler")):
        assert any("has no ratio" in problem for problem in algorithm.problems(Plan()))
    assert not Reinforce.takes_ratio
    assert list(replace(REINFORCE(), corrections=(Importance(),)).problems(Plan(max_staleness=3))) == []
