"""Decoupled PPO: clipped around the learner before the update, weighed from there to the sampler."""

from __future__ import annotations

import math

import pytest

from strop.algorithms.base import Plan
from strop.algorithms.policy_gradient.advantages.grpo import GRPO
from strop.algorithms.policy_gradient.objectives.decoupled_ppo import DecoupledPPO
from support.tokens import loss_gradients, make_step

NOW, BEFORE, SAMPLER = [[-1.0, -1.0], [-1.0]], [[-1.1, -1.5], [-0.9]], [[-2.0, -1.4], [-0.7]]


def test_the_clip_is_about_the_learner_and_the_weight_about_the_sampler() -> None:
    _, slope, logged = loss_gradients(DecoupledPPO(), make_step(NOW, [1.0, -1.0], old=BEFORE, rollout=SAMPLER))
    ratios = [math.exp(0.1), math.exp(0.5), math.exp(-0.1)]
    weights = [math.exp(0.9), math.exp(-0.1), math.exp(-0.2)]
    assert slope == pytest.approx([-ratios[0] * weights[0] / 3, 0.0, ratios[2] * weights[2] / 3])
    assert logged["importance_weight"] == pytest.approx(sum(weights) / 3)


def test_where_the_learner_was_the_sampler_it_is_ppo() -> None:
    step = make_step(NOW, [1.0, -1.0], old=BEFORE, rollout=BEFORE)
    assert loss_gradients(DecoupledPPO(), step)[1] == pytest.approx(loss_gradients(GRPO(), step)[1])


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_the_learner_before_can_be_approximated_between_sampler_and_policy(weight: float) -> None:
    """log pi_o = log mu + a (log pi - log mu): ratio and weight together are still pi / mu, and the clip has its own part of it."""
    gaps = [1.0, 0.4, -0.3]
    algorithm = DecoupledPPO(ratio_to="between", proximal_weight=weight)
    _, slope, logged = loss_gradients(algorithm, make_step(NOW, [1.0, -1.0], old=BEFORE, rollout=SAMPLER))
    ratios = [math.exp((1 - weight) * gap) for gap in gaps]
    weights = [math.exp(weight * gap) for gap in gaps]
    held = [ratio > 1.2 for ratio in ratios[:2]] + [ratios[2] < 0.8]
    signs = [-1, -1, 1]
    wanted = [0.0 if stop else sign * ratio * w / 3 for stop, sign, ratio, w in zip(held, signs, ratios, weights, strict=True)]
    assert slope == pytest.approx(wanted)
    assert logged["probs_ratio"] == pytest.approx(sum(ratios) / 3)
    assert list(algorithm.validate(Plan(group_size=4, max_staleness=2, optimizer_steps=4))) == []


def test_an_approximation_outside_of_sampler_and_policy_is_refused() -> None:
    problems = list(DecoupledPPO(ratio_to="between", proximal_weight=1.5).validate(Plan(group_size=4)))
    assert len(problems) == 1
    assert "proximal_weight" in problems[0]
