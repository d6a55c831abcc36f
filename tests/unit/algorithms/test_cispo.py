"""CISPO: the weight is clipped, the gradient never is."""

from __future__ import annotations

import math

import pytest

from strop.algorithms.policy_gradient.advantages.reinforce import Reinforce
from strop.algorithms.policy_gradient.objectives.cispo import CISPO, ClippedWeight
from support.tokens import evaluate_objective, loss_gradients, make_step

BEFORE = [[-1.0, -2.0, -3.0], [-0.5]]
NOW = [[-0.5, -2.7, -0.5], [-0.6]]


def test_every_token_keeps_a_gradient_of_its_clipped_weight() -> None:
    ratios = [math.exp(0.5), math.exp(-0.7), math.exp(2.5), math.exp(-0.1)]
    found = evaluate_objective(ClippedWeight(low=0.2, high=4.0), make_step(NOW, [2.0, -1.0], old=BEFORE))
    weights = [ratios[0], 0.8, 5.0, ratios[3]]
    assert found.gradient == pytest.approx([2 * weights[0], 2 * weights[1], 2 * weights[2], -weights[3]])
    assert found.value == pytest.approx([slope * now for slope, now in zip(found.gradient, [*NOW[0], *NOW[1]], strict=True)])
    assert found.columns["ratio_outside_clip"] == [0.0, 1.0, 1.0, 0.0]


def test_by_default_only_the_top_is_bounded() -> None:
    found = evaluate_objective(ClippedWeight(), make_step([[-30.0, 0.0]], [1.0], old=[[-1.0, -50.0]]))
    assert found.gradient == pytest.approx([math.exp(-29.0), 5.0])


def test_on_policy_it_is_reinforce() -> None:
    """A clamp at the width of the band instead of one plus it would scale the weight of 1."""
    step = make_step(NOW, [2.0, -1.0])
    for high in (0.2, 4.0):
        assert evaluate_objective(ClippedWeight(high=high), step).gradient == evaluate_objective(Reinforce(), step).gradient


def test_the_loss_is_a_mean_over_all_tokens() -> None:
    _, slope, logged = loss_gradients(CISPO(), make_step(NOW, [2.0, -1.0]))
    assert slope == pytest.approx([-0.5, -0.5, -0.5, 0.25])
    assert logged["probs_ratio"] == 1.0


def test_a_band_without_one_is_refused() -> None:
    with pytest.raises(ValueError, match="low must lie in"):
        ClippedWeight(low=1.5)
