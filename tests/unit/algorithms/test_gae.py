"""Generalised advantage estimation against its sum written out, and its limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from strop.algorithms.critic.gae import RETURNS, TOKEN_REWARDS, VALUES, Gae, place_at_last_token
from strop.algorithms.policy_gradient.parts import GroupRewards
from strop.types import Batch, observation_turn
from support.rollouts import (
    make_group,
    make_rollout,
    pack_grpo,
    sampled_turn,
    simple_groups,
)


def with_critic(batch: Batch, seed: int = 0, *, rewards: Tensor | None = None) -> Batch:
    """The batch with values, and rewards at the ends or for every token."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(batch.target), generator=generator)
    earned = place_at_last_token(batch.rewards, batch) if rewards is None else rewards
    return batch.with_columns({VALUES: values, TOKEN_REWARDS: earned})


def test_a_step_is_a_sampled_token_and_the_value_after_a_turn_is_that_of_the_next_turn() -> None:
    """The same tokens in one turn and in two, with an environment's answer between them, have the same credit."""
    shape = [4, 5, 6, 7]
    one = pack_grpo([make_group(make_rollout([3], sampled_turn(shape), reward=1.0))])
    two = pack_grpo(
        [
            make_group(
                make_rollout([3], sampled_turn(shape[:2]), observation_turn([9, 9, 9], ""), sampled_turn(shape[2:]), reward=1.0)
            )
        ]
    )
    gae = Gae(gamma=0.9, lambda_policy=0.7, whiten=False)
    assert torch.equal(gae.token_advantages(with_critic(one)), gae.token_advantages(with_critic(two)))


@pytest.mark.parametrize("reward", [0.0, 0.3, 1e8, 1e-8])
def test_a_critic_that_is_right_up_to_rounding_leaves_credit_of_exactly_zero(reward: float) -> None:
    """Whitening must not make full-size advantages out of the difference between float32 values and float64 rewards."""
    group = make_group(
        make_rollout([5], sampled_turn([6, 7, 8]), reward=reward), make_rollout([5], sampled_turn([6]), reward=reward)
    )
    batch = with_critic(pack_grpo([group]))
    right = torch.full((4,), reward) * torch.tensor([1.0, 1 + 1e-7, 1 - 1e-7, 1.0])
    assert Gae().token_advantages(batch.with_column(VALUES, right)).tolist() == [0.0] * 4


def test_a_batch_without_counted_tokens_or_with_one_is_harmless() -> None:
    batch = with_critic(pack_grpo(simple_groups((2, (3,)))))
    for mask in ([0.0, 0.0, 0.0], [0.0, 1.0, 0.0]):
        assert Gae().token_advantages(replace(batch, mask=torch.tensor(mask))).tolist() == [0.0, 0.0, 0.0]


def test_before_the_critic_has_spoken_the_credit_is_the_plain_reward() -> None:
    rewards = torch.tensor([0.5, -1.0], dtype=torch.float64)
    assert torch.equal(Gae().rollout_advantages(GroupRewards(rewards=rewards, lengths=torch.ones(2))), rewards)


def test_a_batch_without_values_is_an_error_that_names_them() -> None:
    batch = pack_grpo(simple_groups((2, (3,))))
    with pytest.raises(KeyError, match=VALUES):
        Gae().token_advantages(batch)
    assert RETURNS not in batch.columns
