"""SAPO: a gate that closes smoothly."""

from __future__ import annotations

import math

import pytest

from strop.algorithms.policy_gradient.objectives.sapo import SAPO, SoftGate
from support.tokens import evaluate_objective, loss_gradients, make_step


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def test_value_and_slope_are_those_of_the_formula() -> None:
    shifts = [0.7, -0.4, 0.9]
    step = make_step([[-1 + shifts[0], -1 + shifts[1]], [-1 + shifts[2]]], [2.0, -3.0], old=[[-1.0, -1.0], [-1.0]])
    found = evaluate_objective(SoftGate(tau_positive=1.5, tau_negative=2.5), step)
    for place, (shift, tau, advantage) in enumerate(zip(shifts, (1.5, 1.5, 2.5), (2.0, 2.0, -3.0), strict=True)):
        ratio = math.exp(shift)
        gate = sigmoid(tau * (ratio - 1))
        assert found.value[place] == pytest.approx(4 / tau * gate * advantage)
        assert found.gradient[place] == pytest.approx(4 * gate * (1 - gate) * ratio * advantage)
        assert found.columns["sapo_gate"][place] == pytest.approx(4 * gate * (1 - gate))


def test_on_policy_its_slope_is_the_policy_gradient() -> None:
    _, slope, logged = loss_gradients(SAPO(), make_step([[-1.0, -2.0], [-3.0]], [1.0, -1.0]))
    assert slope == pytest.approx([-0.25, -0.25, 0.5])
    assert logged["sapo_gate"] == pytest.approx(1.0)


def test_far_away_the_gate_is_shut_and_nothing_is_infinite() -> None:
    found = evaluate_objective(SoftGate(), make_step([[0.0], [0.0]], [1.0, -1.0], old=[[-90.0], [-5000.0]]))
    assert found.gradient == [0.0, 0.0]
    assert found.value == pytest.approx([4.0, -4 / 1.05])


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        SoftGate(tau_negative=0.0)
