"""What holds for every algorithm of the family, whatever its parts: idle rollouts, filters, extreme and empty ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.algorithms.base import TokenOutputs
from strop.algorithms.catalogue import all_algorithms
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.advantages.gdpo import DecoupledRewards
from strop.algorithms.policy_gradient.advantages.grpo import GRPO
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.objectives.clip_cov import CovarianceClip
from strop.types import Batch, Ending, Group
from support.each import each
from support.rollouts import make_group, make_rollout, pack_for, sampled_turn
from support.tokens import loss_gradients, make_step

NEEDED: dict[str, dict[str, Any]] = {
    "dr_grpo": {"constant_length": 7},
    "gdpo": {"advantage": DecoupledRewards(weights={"first": 1.0, "second": 0.5})},
    "clip_cov": {"objective": CovarianceClip(share=0.2, lowest=0.1)},
}
FAMILY: dict[str, PolicyGradient] = {
    name: kind(**NEEDED.get(name, {})) for name, kind in all_algorithms().items() if issubclass(kind, PolicyGradient)
}


def answered(*answers: tuple[float, int], ending: Ending = Ending.STOP) -> Group:
    """(reward, length) of each rollout; the greedy one fails."""
    rollouts = [
        replace(
            make_rollout([5], sampled_turn([7] * length), reward=reward, ending=ending),
            rewards={"first": reward, "second": reward},
        )
        for reward, length in answers
    ]
    return replace(make_group(*rollouts), baseline=replace(rollouts[0], reward=0.0))


def loss_and_slope(
    algorithm: PolicyGradient, groups: Sequence[Group], *, now: float, before: float = -2.0, sampler: float = -2.0
) -> tuple[Batch, float, Tensor]:
    """In float32, as a run has it: log-probabilities that spread around ``now``, ``before`` and ``sampler``."""
    batch = pack_for(groups, algorithm)
    count = len(batch.target)
    spread = torch.linspace(-0.3, 0.3, count)
    columns = {name: torch.full((count,), -2.0) for name in algorithm.requires}
    batch = replace(batch, rollout_logprobs=sampler - spread.flip(0)).with_columns(
        {**columns, "policy_logprobs": before - spread}
    )
    batch = algorithm.token_credit(batch)
    logprobs, entropy = (now + spread).requires_grad_(), torch.ones(count)
    seen = TokenOutputs(logprobs.detach(), entropy)
    batch = algorithm.prepare_step(batch, seen if algorithm.needs_step_outputs else None)
    loss, _ = algorithm.loss(TokenOutputs(logprobs, entropy), batch)
    loss.backward()
    assert logprobs.grad is not None
    return batch, float(loss.detach()), logprobs.grad


@each("name", FAMILY)
def test_rollouts_said_to_be_idle_have_exactly_no_gradient(name: str) -> None:
    groups = [answered((1.0, 2), (1.0, 3)), answered((0.0, 2), (1.0, 4)), answered((0.0, 1), (0.0, 2))]
    batch, _, slope = loss_and_slope(FAMILY[name], groups, now=-1.9)
    moved = torch.zeros(6).index_add(0, batch.sequence, slope.abs())
    assert bool((moved[FAMILY[name].zero_gradient(batch)] == 0).all())
    assert float(moved[2:4].sum()) > 0


@each("name", FAMILY)
@each("now, before, sampler", [(-1.0, -500.0, -300.0), (-500.0, -1.0, -1.0), (-1e-6, -1e5, -1e-6)])
def test_extreme_ratios_leave_loss_and_gradient_finite(name: str, now: float, before: float, sampler: float) -> None:
    groups = [answered((1.0, 2), (0.0, 3)), answered((0.0, 2), (0.0, 2)), answered((0.0, 9), (1.0, 1))]
    _, loss, slope = loss_and_slope(FAMILY[name], groups, now=now, before=before, sampler=sampler)
    assert torch.isfinite(torch.tensor(loss))
    assert bool(torch.isfinite(slope).all())


@each("name", FAMILY)
def test_empty_rollouts_are_harmless(name: str) -> None:
    groups = [answered((1.0, 0), (0.0, 3)), answered((0.0, 2), (1.0, 0))]
    _, loss, slope = loss_and_slope(FAMILY[name], groups, now=-1.9)
    assert torch.isfinite(torch.tensor(loss))
    assert bool(torch.isfinite(slope).all())


@each("name", FAMILY)
def test_a_step_of_filtered_rollouts_alone_has_a_loss_of_zero(name: str) -> None:
    algorithm = replace(FAMILY[name], overlong_filtering=True)
    _, loss, slope = loss_and_slope(algorithm, [answered((1.0, 2), (0.0, 3), ending=Ending.LENGTH)], now=-1.9)
    assert loss == 0.0
    assert bool((slope == 0).all())


@each("name", FAMILY)
def test_the_order_of_rollouts_and_groups_does_not_matter(name: str) -> None:
    """Each keeps its credit: rewards, lengths and the batch's statistics are what counts."""
    algorithm = replace(FAMILY[name], kl=None)
    first, second = [(1.0, 2), (0.0, 3), (0.5, 1)], [(0.0, 4), (1.0, 1), (1.0, 2)]

    def credit(groups: Sequence[Sequence[tuple[float, int]]]) -> list[tuple[float, ...]]:
        batch = pack_for([answered(*group) for group in groups], algorithm)
        columns = {name: torch.full((len(batch.target),), -2.0) for name in algorithm.requires}
        batch = algorithm.token_credit(batch.with_columns(columns))
        rows = [
            tuple(round(value, 5) for value in batch.advantages[batch.sequence == row].tolist())
            for row in range(batch.num_sequences)
        ]
        return sorted(rows)

    assert credit([first, second]) == credit([second[::-1], [first[1], first[0], first[2]]])


def test_the_ratio_can_be_taken_to_the_sampler() -> None:
    step = make_step([[-1.0, -1.0]], [1.0], old=[[-1.0, -1.0]], rollout=[[-1.1, -0.5]])
    assert loss_gradients(GRPO(), step)[1] == pytest.approx([-0.5, -0.5])
    _, slope, logged = loss_gradients(GRPO(ratio_to="sampler"), step)
    assert slope == pytest.approx([-math.exp(0.1) / 2, -math.exp(-0.5) / 2])
    assert logged["probs_ratio"] == pytest.approx((math.exp(0.1) + math.exp(-0.5)) / 2)


def test_the_entropy_bonus_is_paid_only_below_its_target() -> None:
    step = make_step([[-1.0, -2.0]], [1.0], entropy=[[0.4, 0.6]])
    for target, paid in [(0.6, 0.1 * 0.5), (0.4, 0.0)]:
        algorithm = GRPO(entropy_bonus=0.1, entropy_target=target)
        assert loss_gradients(algorithm, step)[0] == pytest.approx(-1.0 - paid)
    assert loss_gradients(GRPO(entropy_bonus=0.1), step)[0] == pytest.approx(-1.05)


def test_positive_examples_can_be_taught_as_well() -> None:
    """The mean over the tokens of rollouts with a positive reward; the first rollout of a step here earns 0."""
    step = make_step([[-1.0], [-2.0, -3.0]], [0.0, 0.0])
    loss, slope, _ = loss_gradients(GRPO(positive_nll=0.5), step)
    assert loss == pytest.approx(0.5 * 2.5)
    assert slope == pytest.approx([0.0, -0.25, -0.25])


def test_an_unbiased_kl_term_has_the_gradient_of_the_divergence() -> None:
    """Over all tokens of a small vocabulary, weighted by the chance of each: d KL / d logits."""
    logits = torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    reference = torch.randn(5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for unbiased in (True, False):
        algorithm = GRPO(kl=Kl(weight=1.0, unbiased=unbiased, input_clamp=None, output_clamp=None))
        found = torch.zeros(5, dtype=torch.float64)
        for token in range(5):
            step = make_step([[0.0]], [0.0])
            sampler = logprobs[token : token + 1].detach()
            batch = replace(step.batch, rollout_logprobs=sampler).with_column("reference_logprobs", reference[token : token + 1])
            loss, _ = algorithm.loss(TokenOutputs(logprobs[token : token + 1], torch.zeros(1)), batch)
            found += float(logprobs[token].exp().detach()) * torch.autograd.grad(loss, logits, retain_graph=True)[0]
        assert torch.allclose(found, wanted) == unbiased
