"""VESPO: a rollout weighs phi(w) = w^k exp(lambda (1 - w))."""

from __future__ import annotations

import math

import pytest

from strop.algorithms.base import Plan
from strop.algorithms.policy_gradient.advantages.reinforce import Reinforce
from strop.algorithms.policy_gradient.objectives.vespo import VESPO, GammaWeight
from support.tokens import evaluate_objective, make_step


def test_every_token_of_a_rollout_has_its_product_s_weight() -> None:
    now, sampler = [[-1.0, -2.0], [-0.5]], [[-1.3, -2.1], [-0.1]]
    found = evaluate_objective(GammaWeight(), make_step(now, [2.0, -1.0], rollout=sampler))
    up, down = math.exp(0.4), math.exp(-0.4)
    phi = [up**2 * math.exp(3 * (1 - up)), down**3 * math.exp(2 * (1 - down))]
    assert found.gradient == pytest.approx([2 * phi[0], 2 * phi[0], -phi[1]])
    assert found.columns["rollout_weight"] == pytest.approx([phi[0], phi[0], phi[1]])
    assert found.columns["probs_ratio"] == pytest.approx([up, up, down])


def test_where_sampler_and_policy_agree_it_is_reinforce() -> None:
    step = make_step([[-1.0, -2.0], [-0.5]], [2.0, -1.0])
    assert evaluate_objective(GammaWeight(), step).gradient == pytest.approx(evaluate_objective(Reinforce(), step).gradient)


@pytest.mark.parametrize("shift", [-5000.0, -50.0, 50.0, 5000.0])
def test_rollouts_far_from_the_sampler_weigh_nothing_and_nothing_overflows(shift: float) -> None:
    found = evaluate_objective(GammaWeight(), make_step([[shift / 2 - 1, shift / 2 - 1]], [1.0], rollout=[[-1.0, -1.0]]))
    assert found.gradient == pytest.approx([0.0, 0.0], abs=1e-30)
    assert all(math.isfinite(value) for value in found.columns["probs_ratio"])


def test_the_weight_is_largest_at_k_over_lambda() -> None:
    def weight(ratio: float) -> float:
        return evaluate_objective(GammaWeight(), make_step([[math.log(ratio) - 1]], [1.0], rollout=[[-1.0]])).columns[
            "rollout_weight"
        ][0]

    assert weight(2 / 3) > max(weight(2 / 3 - 0.05), weight(2 / 3 + 0.05))


def test_filtered_tokens_do_not_enter_a_product() -> None:
    found = evaluate_objective(
        GammaWeight(), make_step([[-1.0], [-9.0]], [1.0, 1.0], rollout=[[-1.0], [-1.0]], kept=[True, False])
    )
    assert found.columns["rollout_weight"] == [1.0, 1.0]


def test_it_corrects_by_itself() -> None:
    assert list(VESPO().validate(Plan(group_size=4, max_staleness=8, optimizer_steps=2))) == []
    with pytest.raises(ValueError, match="no bound"):
        GammaWeight(lambda_positive=0.0)
