"""PPO: the critic's loss, warm-up, what is reported, and the edges of its advantage estimates."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from strop.algorithms.base import ValueOutputs
from strop.algorithms.critic import PPO, RETURNS, TOKEN_REWARDS, VALUES, Gae, place_at_last_token
from strop.algorithms.kl import REFERENCE_LOGPROBS, Kl
from strop.algorithms.policy_gradient.parts import GroupRewards
from strop.types import Batch, Ending, Group, observation_turn
from support.rollouts import make_group, make_rollout, pack_for, pack_grpo, sampled_turn, simple_groups


def groups() -> list[Group]:
    return simple_groups((3, (4, 2)), (2, (5,)), seed=3)


def batch_of(algorithm: PPO, found: list[Group] | None = None, *, seed: int = 0) -> Batch:
    """With values and a reference, before credit."""
    batch = pack_for(groups() if found is None else found, algorithm)
    generator = torch.Generator().manual_seed(seed)
    count = len(batch.target)
    columns = {VALUES: torch.randn(count, generator=generator)}
    columns[REFERENCE_LOGPROBS] = batch.rollout_logprobs + torch.randn(count, generator=generator)
    return batch.with_columns(columns)


def value_loss(algorithm: PPO, batch: Batch, values: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    loss, logged = algorithm.value_loss(ValueOutputs(values), batch)
    return loss, {name: metric.value for name, metric in logged.items()}


def test_it_requires_values_and_a_reference_only_for_a_kl_term() -> None:
    assert PPO().requires == {VALUES}
    assert PPO(kl=Kl(weight=0.0)).requires == {VALUES}
    assert PPO(kl=Kl(weight=0.1)).requires == {VALUES, REFERENCE_LOGPROBS}


def test_advantages_are_clipped_after_they_are_whitened() -> None:
    found = PPO(advantage_low=-0.5, advantage_high=0.25).token_credit(batch_of(PPO())).advantages
    assert torch.equal(found, PPO().token_credit(batch_of(PPO())).advantages.clamp(-0.5, 0.25))


def test_the_critics_loss_is_half_the_larger_of_the_plain_and_the_clipped_squared_error() -> None:
    """One token each: inside the clip; outside and away from the return; outside and towards it."""
    algorithm = PPO(value_clip=0.2, value_scale=3.0)
    batch = pack_for([make_group(make_rollout([5], sampled_turn([6, 7, 8]), reward=1.0))], algorithm)
    batch = batch.with_columns({VALUES: torch.tensor([0.0, 0.0, 0.0]), RETURNS: torch.tensor([1.0, 1.0, 1.0])})
    values = torch.tensor([0.1, -0.5, 0.9], requires_grad=True)
    loss, logged = value_loss(algorithm, batch, values)
    errors = [0.9**2, 1.5**2, 0.8**2]  # the third is held at 0.2
    assert loss.item() == pytest.approx(3.0 * sum(errors) / 3 / 2)
    assert logged["clipped"] == pytest.approx(1 / 3)
    assert logged["error"] == pytest.approx((0.9 + 1.5 + 0.1) / 3)
    loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.9, -1.5, 0.0]), "a value that has moved far enough is let go"


def test_no_rollout_is_idle_for_the_critic() -> None:
    batch = PPO().token_credit(batch_of(PPO()))
    silent = replace(batch, advantages=batch.advantages * (batch.sequence != 0))
    assert PPO().zero_gradient(silent, "policy").tolist() == [True, False, False]
    assert PPO().zero_gradient(silent, "value").tolist() == [False, False, False]


def test_rollouts_left_out_of_the_loss_are_left_out_of_the_critics_too() -> None:
    cut = [
        make_group(
            make_rollout([5], sampled_turn([6, 7]), reward=1.0),
            make_rollout([5], sampled_turn([8] * 3), reward=9.0, ending=Ending.LENGTH),
        )
    ]
    algorithm = PPO(overlong_filtering=True, value_clip=None)
    batch = algorithm.token_credit(batch_of(algorithm, cut))
    values = batch.column(VALUES).clone().requires_grad_()
    loss, _ = value_loss(algorithm, batch, values)
    loss.backward()
    assert values.grad is not None
    assert (values.grad == 0).tolist() == [False, False, True, True, True]
    assert loss.item() == pytest.approx(float((values - batch.column(RETURNS))[:2].detach().square().mean() / 2))


def test_the_report_explains_variance() -> None:
    batch = PPO().token_credit(batch_of(PPO(advantage=Gae(lambda_value=1.0))))
    returns = batch.column(RETURNS)
    perfect = PPO().report(batch.with_column(VALUES, returns))
    assert perfect["train/explained_variance"] == pytest.approx(1.0)
    assert PPO().report(batch.with_column(VALUES, returns + 5.0))["train/explained_variance"] == pytest.approx(1.0)
    nothing = PPO().report(batch.with_column(VALUES, torch.zeros_like(returns)))
    assert nothing["train/explained_variance"] == pytest.approx(0.0)
    assert nothing["train/values_mean"] == 0.0
    assert nothing["train/returns_mean"] == pytest.approx(float(returns.mean()))
    assert PPO().report(batch.with_column(VALUES, -returns))["train/explained_variance"] < 0


def test_variance_that_is_not_there_is_not_explained() -> None:
    same = PPO(advantage=Gae(lambda_policy=1.0))
    batch = same.token_credit(batch_of(same, [make_group(make_rollout([5], sampled_turn([6, 7, 8]), reward=1.0))]))
    assert "train/explained_variance" not in same.report(batch)
    masked = replace(batch, mask=torch.zeros_like(batch.mask))
    assert same.report(masked) == {}


def test_a_critics_column_is_filled_by_the_value_learner() -> None:
    from strop.learner.client import ValueColumn
    from support.clients import scorer_client

    class Critic:
        def score(self, batch: Batch) -> ValueOutputs:
            return ValueOutputs(torch.arange(len(batch.target)).float())

    batch = pack_for(groups(), PPO())
    columns = asyncio.run(ValueColumn(VALUES, scorer_client(Critic())).columns(batch, groups()))
    assert columns[VALUES].tolist() == list(range(11))


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
