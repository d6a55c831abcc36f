"""ReMax: what sampling earned beyond the greedy response."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strop.algorithms.base import Plan
from strop.algorithms.policy_gradient.advantages.remax import GreedyBaseline, ReMax
from strop.algorithms.policy_gradient.overlong import SoftOverlong
from strop.types import Group
from support.rollouts import make_group, make_rollout, sampled_turn
from support.tokens import loss_gradients, make_group_rewards, make_step


def answered(*rewards: float, greedy: float, greedy_length: int = 1) -> Group:
    sampled_ones = make_group(*(make_rollout([5], sampled_turn([7]), reward=reward) for reward in rewards))
    return replace(sampled_ones, baseline=make_rollout([5], sampled_turn([7] * greedy_length), reward=greedy))


def test_the_baseline_is_the_greedy_reward() -> None:
    algorithm = ReMax()
    assert algorithm.greedy_baseline
    assert algorithm.advantages(answered(1.0, 0.0, greedy=0.25)).tolist() == [0.75, -0.25]


def test_one_rollout_a_prompt_suffices() -> None:
    assert list(ReMax().validate(Plan(group_size=1, max_staleness=1))) == []
    assert ReMax().advantages(answered(1.0, greedy=0.0)).tolist() == [1.0]


def test_equal_rewards_earn_exactly_nothing_even_with_float_residue() -> None:
    found = GreedyBaseline().rollout_advantages(make_group_rewards(0.1 + 0.2, 0.3, 1.0, greedy=0.3))
    assert found.tolist() == [0.0, 0.0, 0.7]


def test_a_group_without_a_greedy_rollout_is_an_error() -> None:
    with pytest.raises(ValueError, match="this group has none"):
        GreedyBaseline().rollout_advantages(make_group_rewards(1.0))


def test_the_greedy_response_is_shaped_like_the_others() -> None:
    algorithm = ReMax(shaping=SoftOverlong(buffer=2, max_length=4))
    assert algorithm.advantages(answered(1.0, greedy=1.0, greedy_length=3)).tolist() == [0.5]


def test_dynamic_sampling_compares_with_the_greedy_reward_too() -> None:
    algorithm = ReMax(drop_constant_groups=True)
    assert algorithm.keep(answered(1.0, 1.0, greedy=0.0))
    assert not algorithm.keep(answered(1.0, 1.0, greedy=1.0))
    assert list(algorithm.validate(Plan(group_size=1))) == []


def test_the_loss_is_reinforce_over_rollouts() -> None:
    _, slope, _ = loss_gradients(ReMax(), make_step([[-1.0, -2.0], [-4.0]], [0.75, -0.25]))
    assert torch.allclose(torch.tensor(slope), torch.tensor([-0.375, -0.375, 0.125]))
