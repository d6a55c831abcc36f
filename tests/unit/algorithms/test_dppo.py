"""DPPO: the trust region is about how far a probability moved from the sampler's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from strop.algorithms.base import Plan
from strop.algorithms.policy_gradient.corrections.truncated import Tis
from strop.algorithms.policy_gradient.objectives.dppo import DPPO, DivergenceMask
from support.tokens import evaluate_objective, make_step


def logs(*probabilities: float) -> list[float]:
    return [math.log(probability) for probability in probabilities]


def test_only_moves_that_the_advantage_pushes_further_are_masked() -> None:
    now, sampler = [logs(0.7, 0.6, 0.2), logs(0.7, 0.4, 0.2)], [logs(0.5, 0.5, 0.5), logs(0.5, 0.5, 0.5)]
    found = evaluate_objective(DivergenceMask(), make_step(now, [1.0, -1.0], rollout=sampler))
    assert found.columns["divergence_masked"] == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert found.gradient == pytest.approx([0.0, 1.2, 0.4, -1.4, -0.8, 0.0])
    assert found.columns["divergence"] == pytest.approx([0.2, 0.1, 0.3, 0.2, 0.1, 0.3])


def test_an_unlikely_token_may_change_its_ratio_up_to_the_cap() -> None:
    """0.001 to 0.1 is a hundredfold: PPO would clip it, here a tenth of probability is within the bounds."""
    found = evaluate_objective(DivergenceMask(), make_step([logs(0.1)], [1.0], rollout=[logs(0.001)]))
    assert found.gradient == pytest.approx([20.0])
    assert found.columns["ratio_capped"] == [1.0]
    assert found.columns["probs_ratio"] == pytest.approx([100.0])


def test_the_ratio_is_to_the_sampler_not_to_the_learner_before_the_update() -> None:
    found = evaluate_objective(DivergenceMask(), make_step([logs(0.5)], [1.0], old=[logs(0.1)], rollout=[logs(0.4)]))
    assert found.gradient == pytest.approx([1.25])


def test_a_correction_beside_it_would_count_twice() -> None:
    plan = Plan(group_size=4, max_staleness=4)
    assert list(DPPO().validate(plan)) == []
    assert any("count twice" in problem for problem in replace(DPPO(), corrections=(Tis(),)).validate(plan))
    assert any("change nothing" in problem for problem in replace(DPPO(), ratio_to="sampler").validate(plan))


@pytest.mark.parametrize("options", [{"low": -0.1}, {"high": 1.5}, {"cap": 0.5}])
def test_bounds_that_are_no_probabilities_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must lie|at least"):
        DivergenceMask(**options)
