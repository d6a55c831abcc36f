"""What a gradient is in expectation when an older policy sampled: exactly, over all rollouts of a tiny vocabulary.

A policy is a table: logits of the first token, and of the second one given the first. All rollouts of two tokens are one step, each weighed
by its chance under the sampler mu, which is neither the policy pi, nor the policy before the update, nor the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.cases import Sample, Step
from conformance.compose import algorithm, part, policy_gradient
from conformance.harness import through_strop
from strop.algorithms.base import Algorithm
from strop.algorithms.kl import Kl

WORDS = 3
ROLLOUTS = list(product(range(WORDS), repeat=2))


@dataclass(frozen=True)
class Table:
    """An autoregressive policy over rollouts of two tokens."""

    logits: Tensor  # [1 + WORDS, WORDS]

    @property
    def logs(self) -> Tensor:
        return self.logits.log_softmax(-1)

    def of(self, rollout: tuple[int, int]) -> Tensor:  # [2]
        return torch.stack([self.logs[0, rollout[0]], self.logs[1 + rollout[0], rollout[1]]])

    @property
    def chances(self) -> Tensor:  # [rollouts]
        return torch.stack([self.of(rollout).sum().exp() for rollout in ROLLOUTS])


def table(seed: int, near: Table | None = None) -> Table:
    noise = torch.randn(1 + WORDS, WORDS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Table(noise if near is None else near.logits.detach() + 0.6 * noise)


POLICY = Table(table(0).logits.requires_grad_())
BEFORE, SAMPLER, OTHER = table(1, POLICY), table(2, POLICY), table(3, POLICY)


def expected_gradient(subject: Algorithm, *, before: Table, sampler: Table, reference: Table, rewards: Any = None) -> Tensor:
    """The gradient of Strop's loss for the logits of ``POLICY``, in expectation over rollouts of ``sampler``."""

    def sample(place: int, rollout: tuple[int, int]) -> Sample:
        columns = {"now": POLICY, "before": before, "sampler": sampler, "reference": reference, "teacher": reference}
        logs = {name: of.of(rollout).tolist() for name, of in columns.items()}
        reward = 0.0 if rewards is None else float(rewards[place])
        return Sample(reward=reward, entropy=[0.0] * 2, value=[0.0] * 2, new_value=[0.0] * 2, **logs)

    step = Step("all rollouts", (tuple(sample(place, rollout) for place, rollout in enumerate(ROLLOUTS)),))
    slopes = through_strop(subject, step).gradients["logprobs"].reshape(len(ROLLOUTS), 2)
    weights = len(ROLLOUTS) * sampler.chances.detach()[:, None]  # a mean over rollouts becomes an expectation
    logs = torch.stack([POLICY.of(rollout) for rollout in ROLLOUTS])
    (gradient,) = torch.autograd.grad((weights * slopes * logs).sum(), POLICY.logits)
    return gradient


def gradient_of(value: Callable[[], Tensor]) -> Tensor:
    (gradient,) = torch.autograd.grad(value(), POLICY.logits)
    return gradient


def kl_of_rollouts(reference: Table) -> Tensor:
    """KL(pi, reference) of whole rollouts."""
    apart = torch.stack([(POLICY.of(rollout) - reference.of(rollout)).sum() for rollout in ROLLOUTS])
    return (POLICY.chances * apart).sum()


def kl_in_states_of(sampler: Table, reference: Table) -> Tensor:
    """KL(pi, reference) of the next token, summed over the states of a rollout that the sampler began."""
    per_state = (POLICY.logs.exp() * (POLICY.logs - reference.logs)).sum(-1)
    return per_state[0] + (sampler.logs[0].exp().detach() * per_state[1:]).sum()


def assert_equal(found: Tensor, wanted: Tensor) -> None:
    error = float((found - wanted).abs().max() / wanted.abs().max())
    assert error < 1e-14, f"relative error {error:.1e}"


KL = {"weight": 1.0, "input_clamp": None, "output_clamp": None}
WHOLE = {
    "advantage": part("plain_reward"),
    "objective": part("reinforce"),
    "aggregation": "sequence_sum",
    "corrections": (part("importance", level="sequence"),),
}
UPDATED = Table(POLICY.logits.detach())  # the policy before the first optimizer step of a batch is the policy


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("corrections", [(), (part("importance"),), (part("tis"),)], ids=["none", "importance", "tis"])
@pytest.mark.parametrize("before", [BEFORE, UPDATED], ids=["second step", "first step"])
def test_an_unbiased_kl_term_has_the_gradient_of_the_kl_whoever_sampled(estimator: str, corrections: Any, before: Table) -> None:
    """In the states that were sampled, at every optimizer step of a batch, with or without a correction of the objective."""
    kl = Kl(estimator=estimator, unbiased=True, **KL)  # type: ignore[arg-type]
    subject = policy_gradient(
        advantage=part("plain_reward"), objective=part("clip"), corrections=corrections, kl=kl, aggregation="sequence_sum"
    )
    found = expected_gradient(subject, before=before, sampler=SAMPLER, reference=OTHER)
    assert_equal(found, gradient_of(lambda: kl_in_states_of(SAMPLER, OTHER)))


def test_the_gradient_of_k2_is_the_kls_without_a_ratio_and_with_one_it_is_refused() -> None:
    subject = policy_gradient(kl=Kl(estimator="k2", **KL), aggregation="sequence_sum", advantage=part("plain_reward"))  # type: ignore[arg-type]
    found = expected_gradient(subject, before=UPDATED, sampler=UPDATED, reference=OTHER)
    assert_equal(found, gradient_of(lambda: kl_in_states_of(UPDATED, OTHER)))
    with pytest.raises(ValueError, match="with k2 it gives that of E\\[k2\\]"):
        Kl(estimator="k2", unbiased=True)


@pytest.mark.parametrize("place", ["reward", "token_reward"])
def test_a_kl_term_in_the_reward_has_the_gradient_of_the_kl_of_rollouts_that_an_older_policy_sampled(place: str) -> None:
    subject = policy_gradient(**WHOLE, kl=Kl(estimator="k1", place=place, **KL))  # type: ignore[arg-type]
    found = expected_gradient(subject, before=UPDATED, sampler=SAMPLER, reference=OTHER)
    wanted = gradient_of(lambda: kl_of_rollouts(OTHER))
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-6, "credit is rounded to float32"


@pytest.mark.parametrize("corrections", [(), (part("importance"),)], ids=["none", "importance"])
@pytest.mark.parametrize("name", ["reward", "token_reward", "ppo reward", "ppo token_reward", "teacher"])
def test_a_policy_that_is_its_reference_or_teacher_is_left_alone_whoever_sampled(name: str, corrections: Any) -> None:
    """Exactly: the gradient is 0, and not that of a distance to the sampler."""
    options: dict[str, Any] = {"corrections": corrections, "aggregation": "sequence_sum"}
    place = name.rpartition(" ")[2]
    if name == "teacher":
        subject = algorithm("distillation", **options)
    else:
        given = {"advantage": part("gae", whiten=False)} if name.startswith("ppo") else {"advantage": part("plain_reward")}
        kl = Kl(estimator="k1", place=place, **KL)  # type: ignore[arg-type]
        subject = algorithm("ppo" if name.startswith("ppo") else "grpo", kl=kl, **options, **given)
    found = expected_gradient(subject, before=UPDATED, sampler=SAMPLER, reference=UPDATED)
    assert not found.any()


def test_a_teachers_credit_with_importance_weights_has_the_gradient_of_the_reverse_kl() -> None:
    """A token's credit is its own term, so the divergence is that of the next token in the states that were sampled."""
    subject = algorithm("distillation", corrections=(part("importance"),), aggregation="sequence_sum")
    found = expected_gradient(subject, before=UPDATED, sampler=SAMPLER, reference=OTHER)
    assert_equal(found, gradient_of(lambda: kl_in_states_of(SAMPLER, OTHER)))


REWARDS = torch.linspace(-1.0, 2.0, len(ROLLOUTS), dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [
        {"objective": part("reinforce"), "corrections": (part("importance", level="sequence"),)},
        {"objective": part("clip", low=1.0, high=1e30), "corrections": (part("importance", level="sequence"),)},
    ],
    ids=["reinforce", "clip"],
)
def test_importance_weights_of_rollouts_give_the_gradient_of_the_expected_reward(options: dict[str, Any]) -> None:
    subject = policy_gradient(advantage=part("plain_reward"), aggregation="sequence_sum", **options)
    found = expected_gradient(subject, before=UPDATED, sampler=SAMPLER, reference=OTHER, rewards=REWARDS)
    wanted = -gradient_of(lambda: (POLICY.chances * REWARDS).sum())
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-6, "credit is rounded to float32"


def test_rollouts_of_whatever_age_are_weighed_by_topr_and_vespo_as_written() -> None:
    """TOPR without a cap on good rollouts only, and VESPO with k 1 and no decay, are importance sampling of whole rollouts."""
    subject = policy_gradient(advantage=part("plain_reward"), objective=part("tapered", cap=1e30), aggregation="sequence_sum")
    rewards = -1.0 - REWARDS.abs()
    found = expected_gradient(subject, before=BEFORE, sampler=SAMPLER, reference=OTHER, rewards=rewards)
    wanted = -gradient_of(lambda: (POLICY.chances * rewards).sum())
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-6, "credit is rounded to float32"
