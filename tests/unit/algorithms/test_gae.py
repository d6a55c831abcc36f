"""Generalised advantage estimation against its sum written out, and its limits."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.algorithms.critic.gae import RETURNS, TOKEN_REWARDS, VALUES, Gae, place_at_last_token
from strop.algorithms.policy_gradient.parts import GroupRewards
from strop.algorithms.policy_gradient.rewards import discounted_sums
from strop.data.splitting import select_rollouts
from strop.types import Batch, observation_turn
from support.rollouts import (
    GroupShape,
    batch_shapes,
    make_group,
    make_groups,
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


def written_out(batch: Batch, gamma: float, share: float | list[float]) -> list[float]:
    """A_t = sum over k of (gamma lambda)^k (r + gamma V' - V) at t + k, rollout by rollout, token by token, in Python's
    floats.
    """
    rewards, values = batch.column(TOKEN_REWARDS).tolist(), batch.column(VALUES).double().tolist()
    found = [0.0] * len(rewards)
    for rollout in range(batch.num_sequences):
        places = [place for place, owner in enumerate(batch.sequence.tolist()) if owner == rollout]
        own = share if isinstance(share, float) else share[rollout]
        for start in range(len(places)):
            for distance, place in enumerate(places[start:]):
                following = values[places[start + distance + 1]] if start + distance + 1 < len(places) else 0.0
                found[places[start]] += (gamma * own) ** distance * (rewards[place] + gamma * following - values[place])
    return found


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    shapes=batch_shapes,
    seed=st.integers(0, 5),
    gamma=st.sampled_from([1.0, 0.99, 0.5, 0.0]),
    share=st.sampled_from([1.0, 0.95, 0.3, 0.0]),
)
def test_it_is_the_sum_written_out(shapes: list[GroupShape], seed: int, gamma: float, share: float) -> None:
    batch = pack_grpo(make_groups(shapes, seed))
    noisy = torch.randn(len(batch.target), generator=torch.Generator().manual_seed(seed + 9), dtype=torch.float64)
    for rewards in (None, noisy):
        found = with_critic(batch, seed, rewards=rewards)
        gae = Gae(gamma=gamma, lambda_policy=share, whiten=False)
        wanted = written_out(found, gamma, share)
        assert torch.allclose(
            gae._discounted_errors(found, gae.lambdas(found)), torch.tensor(wanted, dtype=torch.float64), atol=1e-12
        )
        assert torch.allclose(gae.token_advantages(found), torch.tensor(wanted), atol=1e-6)
        returns = torch.tensor(wanted, dtype=torch.float64) + found.column(VALUES).double()
        assert torch.allclose(gae.returns(found).double(), returns, atol=1e-6)


def test_with_lambda_and_gamma_one_the_advantage_is_what_is_still_earned_minus_the_value() -> None:
    batch = with_critic(pack_grpo(simple_groups((3, (4, 1)), (2, (6,)))))
    gae = Gae(lambda_policy=1.0, whiten=False)
    earned = batch.rewards[batch.sequence].float()
    assert torch.allclose(gae.token_advantages(batch), earned - batch.column(VALUES), atol=1e-6)
    assert torch.allclose(gae.returns(batch), earned, atol=1e-6), "the critic's targets do not depend on what it said"


def test_with_lambda_zero_it_is_the_one_step_error() -> None:
    batch = with_critic(pack_grpo([make_group(make_rollout([5], sampled_turn([6, 7, 8]), reward=2.0))]))
    values = batch.column(VALUES)
    wanted = torch.stack([0.9 * values[1] - values[0], 0.9 * values[2] - values[1], 2.0 - values[2]])
    assert torch.allclose(Gae(gamma=0.9, lambda_policy=0.0, whiten=False).token_advantages(batch), wanted, atol=1e-6)


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


def test_a_rollout_does_not_see_the_one_after_it() -> None:
    batch = with_critic(pack_grpo(simple_groups((3, (4, 2, 5)))))
    gae = Gae(gamma=0.97, lambda_policy=0.9, whiten=False)
    together = gae.token_advantages(batch)
    for rollout in range(3):
        part = select_rollouts(batch, [rollout])
        assert torch.equal(gae.token_advantages(part.batch), together[part.index])


def test_lambda_adapts_to_the_length_of_a_rollout_and_never_falls_below_zero() -> None:
    batch = with_critic(pack_grpo(simple_groups((3, (4, 40, 400)))))
    gae = Gae(length_adaptive_alpha=0.05, lambda_value=1.0, whiten=False)
    lambdas = [float(gae.lambdas(batch)[batch.sequence == rollout].unique()) for rollout in range(3)]
    assert lambdas == pytest.approx([0.0, 1 - 1 / (0.05 * 40), 1 - 1 / (0.05 * 400)])
    assert torch.allclose(gae.token_advantages(batch), torch.tensor(written_out(batch, 1.0, lambdas)), atol=1e-5)
    assert torch.allclose(gae.returns(batch), batch.rewards[batch.sequence].float(), atol=1e-5), "the critic's own lambda is 1"


def test_the_critic_has_the_policys_lambda_unless_it_is_given_its_own() -> None:
    batch = with_critic(pack_grpo(simple_groups((3, (4, 9)))))
    shared, own = Gae(lambda_policy=0.8, whiten=False), Gae(lambda_policy=0.8, lambda_value=0.3, whiten=False)
    assert torch.allclose(shared.returns(batch), shared.token_advantages(batch) + batch.column(VALUES), atol=1e-6)
    other = Gae(lambda_policy=0.3, whiten=False)
    assert torch.allclose(own.returns(batch), other.token_advantages(batch) + batch.column(VALUES), atol=1e-6)
    assert torch.equal(own.token_advantages(batch), shared.token_advantages(batch))


def test_advantages_are_whitened_over_counted_tokens_and_returns_are_not() -> None:
    batch = with_critic(pack_grpo(simple_groups((3, (4, 9)), (2, (5,)))))
    batch = replace(batch, mask=(batch.sequence != 1).float())
    counted = Gae().token_advantages(batch)[batch.mask > 0].double()
    assert float(counted.mean()) == pytest.approx(0, abs=1e-6)
    assert float(counted.std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert torch.equal(Gae().returns(batch), Gae(whiten=False).returns(batch))
    other = batch.with_column(VALUES, batch.column(VALUES).where(batch.mask > 0, torch.tensor(1e6)))
    assert torch.equal(Gae().token_advantages(other)[batch.mask > 0], Gae().token_advantages(batch)[batch.mask > 0])


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


def test_rewards_stand_at_the_last_token_of_each_rollout_and_an_empty_rollout_has_none() -> None:
    group = make_group(
        make_rollout([5], sampled_turn([6, 7]), reward=1.0),
        make_rollout([5], reward=9.0),
        make_rollout([5], sampled_turn([8]), reward=-2.0),
    )
    assert place_at_last_token(pack_grpo([group]).rewards, pack_grpo([group])).tolist() == [0.0, 1.0, -2.0]


def test_ten_thousand_tokens_take_a_few_steps_and_lose_no_digits() -> None:
    length = 10_000
    batch = pack_grpo([make_group(make_rollout([5], sampled_turn([6] * length)), make_rollout([5], sampled_turn([6] * 17)))])
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(length + 17, generator=generator, dtype=torch.float64)
    decay = torch.full((length + 17,), 0.999, dtype=torch.float64)
    started = time.perf_counter()
    found = discounted_sums(values, decay, batch).tolist()
    assert time.perf_counter() - started < 1.0
    wanted = 0.0
    for place in reversed(range(length)):
        wanted = float(values[place]) + 0.999 * wanted
        assert found[place] == pytest.approx(wanted, rel=1e-11, abs=1e-11)


def test_before_the_critic_has_spoken_the_credit_is_the_plain_reward() -> None:
    rewards = torch.tensor([0.5, -1.0], dtype=torch.float64)
    assert torch.equal(Gae().rollout_advantages(GroupRewards(rewards=rewards, lengths=torch.ones(2))), rewards)


@pytest.mark.parametrize(
    ("option", "value"), [("gamma", 1.1), ("lambda_policy", -0.1), ("lambda_value", 2.0), ("length_adaptive_alpha", -1.0)]
)
def test_what_is_no_share_is_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option} is {value}"):
        Gae(**{option: value})


def test_a_batch_without_values_is_an_error_that_names_them() -> None:
    batch = pack_grpo(simple_groups((2, (3,))))
    with pytest.raises(KeyError, match=VALUES):
        Gae().token_advantages(batch)
    assert RETURNS not in batch.columns
