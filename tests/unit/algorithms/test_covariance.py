"""Clip-Cov and KL-Cov: tokens whose credit and log-probability rise together are held back."""

from __future__ import annotations

from dataclasses import replace

import torch

from strop.algorithms.policy_gradient.objectives.clip_cov import CovarianceClip
from strop.algorithms.policy_gradient.objectives.kl_cov import CovarianceKl
from support.tokens import Step, evaluate_objective, make_step


def spread(size: int = 40) -> Step:
    """Two rollouts, one praised and one blamed, log-probabilities falling from 0 to -8."""
    falling = [-8 * place / size for place in range(size)]
    return make_step([falling, falling], [2.0, -2.0])


def test_the_draw_is_the_same_in_a_repeated_run_and_another_for_other_tokens() -> None:
    step = spread()
    again = evaluate_objective(CovarianceClip(share=0.05), spread()).columns
    torch.manual_seed(1)
    assert evaluate_objective(CovarianceClip(share=0.05), step).columns == again
    other = replace(step, batch=replace(step.batch, target=step.batch.target + 3))
    assert evaluate_objective(CovarianceClip(share=0.05), other).columns != again


def test_tokens_the_clip_already_holds_are_not_chosen() -> None:
    now = [[0.0, -4.0, -4.0], [0.0, -4.0, -4.0]]
    step = make_step(now, [2.0, -2.0], old=[[-1.0, -4.0, -4.0], [0.0, -4.0, -4.0]])
    found = evaluate_objective(CovarianceClip(share=1.0, lowest=0.1, highest=99.0), step)
    assert found.columns["ratio_clipped"][0] == 1.0
    assert found.columns["covariance_clipped"] == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]


def test_at_least_one_token_is_held_back_in_the_smallest_step() -> None:
    step = make_step([[-0.1, -4.0], [-0.1, -4.0]], [2.0, -2.0], old=[[-0.1, -4.0], [-0.1, -4.0]])
    assert sum(evaluate_objective(CovarianceKl(), step).columns["covariance_penalised"]) == 1
    assert sum(evaluate_objective(CovarianceClip(), step).columns["covariance_clipped"]) == 1
