"""Lite PPO: the group's mean, the batch's deviation."""

from __future__ import annotations

import pytest

from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.advantages.lite_ppo import LitePPO
from strop.types import Group
from support.rollouts import make_group, make_rollout, pack_for, sampled_turn


def answered(*rewards: float) -> Group:
    return make_group(*(make_rollout([5], sampled_turn([7]), reward=reward) for reward in rewards))


def test_credit_is_centred_by_the_group_and_scaled_by_the_batch() -> None:
    algorithm = LitePPO()
    credit = algorithm.token_credit(pack_for([answered(1.0, 0.0), answered(0.5, 0.5), answered(0.1, 0.3)], algorithm)).advantages
    rewards = [1.0, 0.0, 0.5, 0.5, 0.1, 0.3]
    mean = sum(rewards) / 6
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / 6) ** 0.5
    assert credit.tolist() == pytest.approx([value / deviation for value in (0.5, -0.5, 0.0, 0.0, -0.1, 0.1)], rel=1e-5)
    assert credit[2:4].tolist() == [0.0, 0.0], "exactly: the second group does not vary"


def test_a_batch_that_does_not_vary_is_not_blown_up() -> None:
    algorithm = LitePPO()
    credit = algorithm.token_credit(pack_for([answered(0.1 + 0.2, 0.3), answered(0.3, 0.3)], algorithm)).advantages
    assert credit.tolist() == [0.0] * 4


def test_the_deviation_is_of_the_rewards_with_the_kl_term_where_it_is_in_them() -> None:
    algorithm = LitePPO(kl=Kl(weight=1.0, estimator="k1", place="reward"))
    batch = pack_for([answered(1.0, 0.0)], algorithm)
    batch = batch.with_column("reference_logprobs", batch.rollout_logprobs - batch.rollout_logprobs.new_tensor([3.0, 0.0]))
    credited = algorithm.token_credit(batch)
    assert credited.advantages.tolist() == pytest.approx([-1.0, 1.0], rel=1e-5), "rewards are -2 and 0 now, of deviation 1"
    assert credited.rewards.tolist() == [1.0, 0.0], "the batch still says what was earned"
