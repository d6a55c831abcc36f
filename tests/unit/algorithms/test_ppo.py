"""PPO: where rewards and KL terms stand, the critic's loss, warm-up, and what is reported."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from strop.algorithms.base import ValueOutputs
from strop.algorithms.critic.gae import RETURNS, VALUES, Gae
from strop.algorithms.critic.ppo import PPO
from strop.algorithms.kl import REFERENCE_LOGPROBS, Kl
from strop.types import Batch, Ending, Group
from support.rollouts import make_group, make_rollout, pack_for, sampled_turn, simple_groups


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


def test_before_the_policys_first_step_only_the_critic_trains() -> None:
    algorithm = PPO(policy_training_start_step=2)
    assert [sorted(algorithm.losses(step)) for step in range(4)] == [
        ["value"],
        ["value"],
        ["policy", "value"],
        ["policy", "value"],
    ]
    assert sorted(PPO().losses(0)) == ["policy", "value"]


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
