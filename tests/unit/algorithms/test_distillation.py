"""Distillation by a per-token advantage: what a token earns, how rewards are mixed in, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strop.algorithms.base import Plan, TokenOutputs
from strop.algorithms.distillation.distillation import TEACHER_LOGPROBS, Distillation, ReverseKl
from strop.algorithms.functional import POLICY_LOGPROBS
from strop.algorithms.kl import REFERENCE_LOGPROBS, Kl
from strop.algorithms.policy_gradient.advantages.grpo import GRPO, GroupRelative
from strop.types import Batch
from support.rollouts import make_group, make_rollout, pack_for, sampled_turn, simple_groups


def batch_of(algorithm: Distillation, *, seed: int = 0) -> Batch:
    """With a teacher's column, before credit."""
    batch = pack_for(simple_groups((3, (4, 2)), (2, (5,))), algorithm)
    noise = torch.randn(len(batch.target), generator=torch.Generator().manual_seed(seed))
    return batch.with_column(TEACHER_LOGPROBS, batch.rollout_logprobs + noise)


def test_a_token_earns_what_the_teacher_gives_it_more_than_the_policy_did() -> None:
    batch = batch_of(Distillation())
    assert torch.equal(Distillation().token_credit(batch).advantages, batch.column(TEACHER_LOGPROBS) - batch.rollout_logprobs)


def test_a_teacher_that_is_the_policy_teaches_exactly_nothing() -> None:
    batch = batch_of(Distillation())
    batch = Distillation().token_credit(batch.with_column(TEACHER_LOGPROBS, batch.rollout_logprobs))
    assert batch.advantages.tolist() == [0.0] * 11
    assert bool(Distillation().zero_gradient(batch).all())
    assert Distillation().report(batch) == {"train/teacher_kl": 0.0}


def test_on_policy_the_gradient_is_that_of_the_reverse_kl() -> None:
    """The expectation over all tokens of one place, from the loss of each of them: grad KL(pi || T) = sum pi (log pi - log T)
    grad log pi.
    """
    logits = torch.tensor([0.3, -0.2, 1.0, 0.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([1.0, 0.5, -0.5, 0.0], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    wanted = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)[0]
    found = torch.zeros_like(logits)
    for token in range(4):
        group = make_group(make_rollout([5], sampled_turn([token], [policy[token].item()])))
        batch = Distillation().token_credit(
            pack_for([group], Distillation()).with_column(TEACHER_LOGPROBS, teacher[token, None].float())
        )
        loss, _ = Distillation().loss(TokenOutputs(policy[token, None], torch.zeros(1)), batch)
        found += policy[token].exp().detach() * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.allclose(found, wanted, atol=1e-6)


def test_rewards_are_mixed_in_by_their_weight() -> None:
    algorithm = Distillation(advantage=ReverseKl(reward_weight=0.5))
    batch = batch_of(algorithm)
    relative = pack_for(simple_groups((3, (4, 2)), (2, (5,))), GRPO()).advantages
    found = algorithm.token_credit(batch).advantages
    assert torch.allclose(found, batch.column(TEACHER_LOGPROBS) - batch.rollout_logprobs + 0.5 * relative, atol=1e-6)


def test_without_a_weight_rewards_make_no_difference_and_a_group_may_be_a_single_rollout() -> None:
    assert list(Distillation().validate(Plan(group_size=1))) == []
    assert not pack_for(simple_groups((3, (4, 2))), Distillation()).advantages.any()
    mixed = Distillation(advantage=ReverseKl(reward_weight=1.0, reward=GroupRelative()))
    assert any("the group size is 1" in problem for problem in mixed.validate(Plan(group_size=1)))
    assert list(mixed.validate(Plan(group_size=4))) == []


def test_the_sum_of_both_advantages_is_bounded() -> None:
    algorithm = Distillation(advantage_low=-1.0, advantage_high=0.5)
    batch = batch_of(algorithm)
    batch = batch.with_column(TEACHER_LOGPROBS, batch.column(TEACHER_LOGPROBS) - torch.arange(11) * 3)
    credit = algorithm.token_credit(batch).advantages
    assert float(credit.min()) == -1.0
    assert float(credit.max()) <= 0.5


def test_it_requires_a_teacher_and_the_policy_before_the_update_and_a_reference_only_for_a_kl_term() -> None:
    assert Distillation().requires == {TEACHER_LOGPROBS, POLICY_LOGPROBS}
    assert Distillation(kl=Kl(weight=0.1)).requires == {TEACHER_LOGPROBS, POLICY_LOGPROBS, REFERENCE_LOGPROBS}


def test_it_reports_how_far_the_policy_is_from_its_teacher_on_counted_tokens() -> None:
    batch = batch_of(Distillation())
    batch = replace(batch, mask=(batch.sequence != 2).float())
    apart = (batch.rollout_logprobs - batch.column(TEACHER_LOGPROBS))[batch.sequence != 2]
    assert Distillation().report(batch)["train/teacher_kl"] == pytest.approx(float(apart.mean()))
    assert Distillation().report(replace(batch, mask=torch.zeros(11))) == {}


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (Distillation(kl=Kl(weight=0.1, place="token_reward")), "put it in the loss"),
        (Distillation(kl=Kl(weight=0.1, place="reward")), "put it in the loss"),
        (Distillation(drop_constant_groups=True), "rewards that have no weight in the loss"),
        (Distillation(advantage=ReverseKl(reward_weight=-1.0)), "reward_weight is -1.0"),
    ],
)
def test_what_makes_no_sense_is_refused(algorithm: Distillation, said: str) -> None:
    assert any(said in problem for problem in algorithm.validate(Plan(group_size=4)))
