"""GMPO: the geometric mean of ratios that are clipped one by one."""

from __future__ import annotations

import math

import pytest

from strop.algorithms.base import Plan
from strop.algorithms.policy_gradient.objectives.gmpo import GMPO, GeometricMean
from support.tokens import evaluate_objective, loss_gradients, make_step

ZEROS = [[-1.0] * 3, [-1.0] * 2]
MOVED = [[-1.0 + 0.1, -1.0 + 0.9, -1.0 - 0.7], [-1.0 + 0.6, -1.0 - 0.5]]


def test_the_mean_over_a_rollout_is_the_paper_s_term() -> None:
    """A > 0 holds what rose by more than 0.4 nats, A < 0 what fell by more; the other sides are free."""
    found = evaluate_objective(GeometricMean(), make_step(MOVED, [2.0, -1.0], old=ZEROS))
    up, down = math.exp((0.1 + 0.4 - 0.7) / 3), math.exp((0.6 - 0.4) / 2)
    assert found.value == pytest.approx([2 * up] * 3 + [-down] * 2)
    assert found.gradient == pytest.approx([2 * up, 0.0, 2 * up, -down, 0.0])
    assert found.columns["ratio_clipped"] == [0.0, 1.0, 0.0, 0.0, 1.0]
    assert found.columns["ratio_outside_clip"] == [0.0, 1.0, 1.0, 1.0, 1.0]


def test_the_loss_is_the_mean_over_rollouts() -> None:
    loss, slope, logged = loss_gradients(GMPO(), make_step(MOVED, [2.0, -1.0], old=ZEROS))
    up, down = math.exp(-0.2 / 3), math.exp(0.1)
    assert loss == pytest.approx(-(2 * up - down) / 2)
    assert slope == pytest.approx([-2 * up / 6, 0.0, -2 * up / 6, down / 4, 0.0])
    assert logged["probs_ratio_max"] == pytest.approx(down)


def test_extreme_ratios_stay_finite() -> None:
    step = make_step([[-1.0, 0.0], [-900.0]], [-1.0, 1.0], old=[[-1.0, -500.0], [-1.0]])
    loss, slope, _ = loss_gradients(GMPO(), step)
    assert math.isfinite(loss)
    assert all(math.isfinite(value) for value in slope)


def test_a_mean_over_tokens_is_refused() -> None:
    problems = list(GMPO(aggregation="token_mean").validate(Plan(group_size=4)))
    assert len(problems) == 1
    assert "sequence_mean" in problems[0]
    with pytest.raises(ValueError, match="negative"):
        GeometricMean(low=-0.1)
