"""ReMax: what sampling earned beyond the greedy response."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strop.algorithms.policy_gradient.advantages.remax import GreedyBaseline, ReMax
from strop.algorithms.policy_gradient.overlong import SoftOverlong
from strop.types import Group
from support.rollouts import make_group, make_rollout, sampled_turn
from support.tokens import make_group_rewards


def answered(*rewards: float, greedy: float, greedy_length: int = 1) -> Group:
    sampled_ones = make_group(*(make_rollout([5], sampled_turn([7]), reward=reward) for reward in rewards))
    return replace(sampled_ones, baseline=make_rollout([5], sampled_turn([7] * greedy_length), reward=greedy))


def test_a_group_without_a_greedy_rollout_is_an_error() -> None:
    with pytest.raises(ValueError, match="this group has none"):
        GreedyBaseline().rollout_advantages(make_group_rewards(1.0))


def test_the_greedy_response_is_shaped_like_the_others() -> None:
    algorithm = ReMax(shaping=SoftOverlong(buffer=2, max_length=4))
    assert algorithm.advantages(answered(1.0, greedy=1.0, greedy_length=3)).tolist() == [0.5]
