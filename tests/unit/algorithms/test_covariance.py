"""Clip-Cov and KL-Cov: tokens whose credit and log-probability rise together are held back."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from strop.algorithms.base import Plan
from strop.algorithms.policy_gradient.objectives.clip_cov import ClipCov, CovarianceClip, covariances
from strop.algorithms.policy_gradient.objectives.kl_cov import CovarianceKl, KlCov
from support.tokens import Step, evaluate_objective, loss_gradients, make_step


def spread(size: int = 40) -> Step:
    """Two rollouts, one praised and one blamed, log-probabilities falling from 0 to -8."""
    falling = [-8 * place / size for place in range(size)]
    return make_step([falling, falling], [2.0, -2.0])


def by_hand(step: Step) -> list[float]:
    logprobs, credit = step.logprobs.tolist(), step.batch.advantages.tolist()
    mean, middle = sum(logprobs) / len(logprobs), sum(credit) / len(credit)
    return [(a - middle) * (logprob - mean) for a, logprob in zip(credit, logprobs, strict=True)]


def test_covariances_are_products_of_distances_from_the_step_s_means() -> None:
    step = spread()
    assert covariances(step.tokens()).tolist() == pytest.approx(by_hand(step))


def test_tokens_that_do_not_count_neither_enter_the_means_nor_are_chosen() -> None:
    step = make_step([[-1.0, -3.0], [-50.0]], [1.0, 99.0], kept=[True, False])
    assert covariances(step.tokens()).tolist() == pytest.approx([0.0, 0.0, -math.inf])


def test_clip_cov_leaves_out_the_asked_number_of_tokens_within_the_band() -> None:
    step = spread()
    found = evaluate_objective(CovarianceClip(share=0.1), step)
    left_out = [place for place, value in enumerate(found.columns["covariance_clipped"]) if value]
    values = by_hand(step)
    assert len(left_out) == 8
    assert all(1.0 < values[place] < 5.0 for place in left_out)
    assert all((found.gradient[place] == 0) == (place in left_out) for place in range(80))


def test_the_draw_is_the_same_in_a_repeated_run_and_another_for_other_tokens() -> None:
    step = spread()
    again = evaluate_objective(CovarianceClip(share=0.05), spread()).columns
    torch.manual_seed(1)
    assert evaluate_objective(CovarianceClip(share=0.05), step).columns == again
    other = replace(step, batch=replace(step.batch, target=step.batch.target + 3))
    assert evaluate_objective(CovarianceClip(share=0.05), other).columns != again


def test_the_largest_can_be_chosen_instead() -> None:
    step = spread()
    found = evaluate_objective(CovarianceClip(share=0.05, choose="largest"), step).columns["covariance_clipped"]
    values = [value if 1.0 < value < 5.0 else -math.inf for value in by_hand(step)]
    assert [place for place, value in enumerate(found) if value] == sorted(
        sorted(range(80), key=lambda place: -values[place])[:4]
    )


def test_tokens_the_clip_already_holds_are_not_chosen() -> None:
    now = [[0.0, -4.0, -4.0], [0.0, -4.0, -4.0]]
    step = make_step(now, [2.0, -2.0], old=[[-1.0, -4.0, -4.0], [0.0, -4.0, -4.0]])
    found = evaluate_objective(CovarianceClip(share=1.0, lowest=0.1, highest=99.0), step)
    assert found.columns["ratio_clipped"][0] == 1.0
    assert found.columns["covariance_clipped"] == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("objective", [CovarianceClip(), CovarianceKl()])
def test_a_step_without_counted_tokens_is_harmless(objective: CovarianceClip) -> None:
    assert evaluate_objective(objective, make_step([[-1.0, -2.0]], [1.0], kept=[False])).gradient == [0.0, 0.0]


def test_kl_cov_penalises_the_tokens_of_largest_covariance() -> None:
    now = [[-0.1, -3.0, -2.0], [-0.2, -6.0, -5.0]]
    before = [[-0.3, -3.0, -2.5], [-0.1, -6.5, -4.9]]
    step = make_step(now, [1.0, -1.0], old=before)
    found = evaluate_objective(CovarianceKl(share=0.5, weight=0.3), step)
    largest = sorted(sorted(range(6), key=lambda place: -by_hand(step)[place])[:3])
    assert [place for place, value in enumerate(found.columns["covariance_penalised"]) if value] == largest
    gaps = [0.2, 0.0, 0.5, -0.1, 0.5, -0.1]
    for place, gap in enumerate(gaps):
        advantage = 1.0 if place < 3 else -1.0
        penalty = 0.3 * (place in largest)
        assert found.value[place] == pytest.approx(math.exp(gap) * advantage - penalty * abs(gap))
        sign = (gap > 0) - (gap < 0)
        assert found.gradient[place] == pytest.approx(math.exp(gap) * advantage - penalty * sign, abs=1e-12)


def test_at_least_one_token_is_held_back_in_the_smallest_step() -> None:
    step = make_step([[-0.1, -4.0], [-0.1, -4.0]], [2.0, -2.0], old=[[-0.1, -4.0], [-0.1, -4.0]])
    assert sum(evaluate_objective(CovarianceKl(), step).columns["covariance_penalised"]) == 1
    assert sum(evaluate_objective(CovarianceClip(), step).columns["covariance_clipped"]) == 1


def test_kl_cov_with_one_step_a_batch_would_do_nothing_and_is_refused() -> None:
    assert any("the term has no effect" in problem for problem in KlCov().validate(Plan(group_size=4)))
    assert list(KlCov().validate(Plan(group_size=4, optimizer_steps=2))) == []
    assert list(KlCov(ratio_to="sampler").validate(Plan(group_size=4, max_staleness=1))) == []
    assert list(ClipCov().validate(Plan(group_size=4))) == []


def test_no_rollout_is_idle_where_tokens_without_credit_are_penalised() -> None:
    step = make_step([[-1.0], [-2.0]], [0.0, 0.0])
    assert not KlCov().zero_gradient(step.batch).any()
    assert ClipCov().zero_gradient(step.batch).all()


def test_the_whole_algorithm_surveys_the_step_it_is_shown() -> None:
    step = spread()
    assert ClipCov().needs_step_outputs
    _, slope, logged = loss_gradients(ClipCov(objective=CovarianceClip(share=0.1)), step)
    assert logged["covariance_clipped"] == pytest.approx(0.1)
    assert sum(value == 0 for value in slope) == 8


@pytest.mark.parametrize("options", [{"share": 0.0}, {"share": 1.5}, {"lowest": 5.0, "highest": 5.0}])
def test_an_empty_band_or_share_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="share must lie"):
        CovarianceClip(**options)  # type: ignore[arg-type]
