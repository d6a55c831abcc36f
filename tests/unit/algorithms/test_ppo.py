"""PPO: where rewards and KL terms stand, the critic's loss, warm-up, and what is reported."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from strop.algorithms.base import Plan, TokenOutputs, ValueOutputs
from strop.algorithms.critic.gae import RETURNS, TOKEN_REWARDS, VALUES, Gae
from strop.algorithms.critic.ppo import PPO
from strop.algorithms.critic.vapo import VAPO
from strop.algorithms.kl import REFERENCE_LOGPROBS, Kl, kl_estimate
from strop.algorithms.policy_gradient.advantages.grpo import GRPO
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


def test_a_rollout_earns_its_reward_at_its_last_token() -> None:
    batch = PPO().token_credit(batch_of(PPO()))
    earned = batch.column(TOKEN_REWARDS)
    assert earned.nonzero().flatten().tolist() == [3, 5, 10]
    assert torch.equal(earned[[3, 5, 10]], batch.rewards)
    assert torch.allclose(batch.advantages, Gae().token_advantages(batch))
    assert torch.allclose(batch.column(RETURNS), Gae().returns(batch))


def test_a_kl_term_in_token_rewards_is_taken_from_each_tokens_own_reward() -> None:
    algorithm = PPO(kl=Kl(weight=0.1, estimator="k1", place="token_reward"))
    batch = algorithm.token_credit(batch_of(algorithm))
    apart = kl_estimate(batch.rollout_logprobs, batch.column(REFERENCE_LOGPROBS), "k1").double()
    plain = PPO().token_credit(batch_of(PPO())).column(TOKEN_REWARDS)
    assert torch.allclose(batch.column(TOKEN_REWARDS), plain - 0.1 * apart)


def test_with_lambda_one_a_tokens_credit_falls_by_the_kl_of_all_that_follows() -> None:
    """What the family's credit does without a critic, so that both mean the same by token_reward."""
    kl = Kl(weight=0.1, estimator="k1", place="token_reward")
    algorithm = PPO(kl=kl, advantage=Gae(lambda_policy=1.0, whiten=False))
    batch = batch_of(algorithm)
    found = algorithm.token_credit(batch).advantages
    wanted = batch.rewards[batch.sequence] - 0.1 * kl.sum_to_go(batch) - batch.column(VALUES).double()
    assert torch.allclose(found.double(), wanted, atol=1e-6)


def test_a_kl_term_in_the_reward_is_the_sum_at_the_last_token() -> None:
    kl = Kl(weight=0.1, estimator="k3", place="reward")
    algorithm = PPO(kl=kl)
    batch = algorithm.token_credit(batch_of(algorithm))
    assert torch.allclose(batch.column(TOKEN_REWARDS)[[3, 5, 10]], batch.rewards - 0.1 * kl.sum_per_rollout(batch))
    assert batch.column(TOKEN_REWARDS).count_nonzero() == 3


def test_a_kl_term_in_the_loss_leaves_rewards_alone_and_adds_to_the_policys_loss() -> None:
    algorithm = PPO(kl=Kl(weight=0.1, place="loss"))
    batch = algorithm.token_credit(batch_of(algorithm))
    assert torch.equal(batch.advantages, PPO().token_credit(batch_of(PPO())).advantages)
    outputs = TokenOutputs(batch.rollout_logprobs, torch.zeros(len(batch.target)))
    with_kl, without = algorithm.loss(outputs, batch)[0], PPO().loss(outputs, batch)[0]
    assert float(with_kl) > float(without)


def test_it_requires_values_and_a_reference_only_for_a_kl_term() -> None:
    assert PPO().requires == {VALUES}
    assert PPO(kl=Kl(weight=0.0)).requires == {VALUES}
    assert PPO(kl=Kl(weight=0.1)).requires == {VALUES, REFERENCE_LOGPROBS}


def test_advantages_are_clipped_after_they_are_whitened() -> None:
    found = PPO(advantage_low=-0.5, advantage_high=0.25).token_credit(batch_of(PPO())).advantages
    assert torch.equal(found, PPO().token_credit(batch_of(PPO())).advantages.clamp(-0.5, 0.25))


def test_the_policys_loss_is_that_of_any_policy_gradient_with_this_credit() -> None:
    batch = PPO().token_credit(batch_of(PPO()))
    outputs = TokenOutputs(batch.rollout_logprobs + 0.1, torch.zeros(len(batch.target)))
    assert torch.equal(PPO().loss(outputs, batch)[0], GRPO().loss(outputs, batch)[0])


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


def test_without_a_clip_the_critics_loss_is_half_the_mean_squared_error() -> None:
    algorithm = PPO(value_clip=None)
    batch = algorithm.token_credit(batch_of(algorithm))
    values = torch.randn(len(batch.target), generator=torch.Generator().manual_seed(1))
    loss, logged = value_loss(algorithm, batch, values)
    assert float(loss) == pytest.approx(float((values - batch.column(RETURNS)).square().mean() / 2))
    assert logged["clipped"] == 0.0


def test_at_the_values_before_the_update_the_clip_changes_neither_loss_nor_gradient() -> None:
    batch = PPO().token_credit(batch_of(PPO()))
    found = []
    for clip in (0.2, None):
        values = batch.column(VALUES).clone().requires_grad_()
        loss, _ = value_loss(PPO(value_clip=clip), batch, values)
        loss.backward()
        found.append((loss.detach(), values.grad))
    assert torch.allclose(found[0][0], found[1][0])
    assert torch.allclose(found[0][1], found[1][1])  # type: ignore[arg-type]


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


def test_a_group_may_be_a_single_rollout() -> None:
    assert list(PPO().validate(Plan(group_size=1))) == []
    assert (
        list(PPO(kl=Kl(weight=0.1, place="token_reward")).validate(Plan(group_size=1, optimizer_steps=4, max_staleness=1))) == []
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"value_scale": 0.0}, "value_scale is 0.0"),
        ({"value_clip": 0.0}, "value_clip is 0.0"),
        ({"drop_constant_groups": True}, "group of one"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    assert any(said in problem for problem in PPO(**options).validate(Plan(group_size=1)))


def test_vapo_trains_its_critic_on_plain_returns_and_imitates_what_was_right() -> None:
    algorithm = VAPO()
    batch = algorithm.token_credit(batch_of(algorithm))
    assert torch.allclose(batch.column(RETURNS), batch.rewards[batch.sequence].float(), atol=1e-6)
    surveyed = algorithm.prepare_step(batch, None)
    outputs = TokenOutputs(batch.rollout_logprobs, torch.zeros(len(batch.target)))
    plain = replace(algorithm, positive_nll=0.0)
    right = batch.rewards[batch.sequence] > 0
    difference = float(algorithm.loss(outputs, surveyed)[0] - plain.loss(outputs, batch)[0])
    assert difference == pytest.approx(-0.1 * float(batch.rollout_logprobs[right].mean()), rel=1e-5)
    assert sorted(algorithm.losses(49)) == ["value"]
    assert sorted(algorithm.losses(50)) == ["policy", "value"]


def test_a_critics_column_is_filled_by_the_value_learner() -> None:
    from strop.learner.client import ValueColumn
    from support.clients import scorer_client

    class Critic:
        def score(self, batch: Batch) -> ValueOutputs:
            return ValueOutputs(torch.arange(len(batch.target)).float())

    batch = pack_for(groups(), PPO())
    columns = asyncio.run(ValueColumn(VALUES, scorer_client(Critic())).columns(batch, groups()))
    assert columns[VALUES].tolist() == list(range(11))
