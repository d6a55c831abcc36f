"""M2PO: the tokens that make the second moment large are found on the whole step and get no gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.base import Plan
from strop.algorithms.policy_gradient.objectives.m2po import M2PO, SecondMomentMask, smallest_within_mean
from support.tokens import evaluate_objective, loss_gradients, make_step


@settings(max_examples=60, deadline=None, derandomize=True)
@given(values=st.lists(st.integers(0, 30).map(lambda value: value / 100), max_size=12), limit=st.sampled_from([0.01, 0.04, 0.1]))
def test_the_largest_are_dropped_one_by_one_until_the_mean_is_within_the_limit(values: list[float], limit: float) -> None:
    remaining = sorted(values)
    while remaining and math.fsum(remaining) / len(remaining) > limit + 1e-15:
        remaining.pop()
    kept = smallest_within_mean(torch.tensor(values, dtype=torch.float64), limit + 1e-15)
    assert sorted(torch.tensor(values, dtype=torch.float64)[kept].tolist()) == remaining


def test_only_tokens_that_are_pushed_further_away_are_looked_at() -> None:
    now, sampler = [[-1.0, -1.0, -1.0], [-1.0, -1.0]], [[-1.1, -2.0, -0.2], [-0.1, -1.9]]
    found = evaluate_objective(SecondMomentMask(), make_step(now, [2.0, -1.0], rollout=sampler))
    ratios = [math.exp(shift) for shift in (0.1, 1.0, -0.8, -0.9, 0.9)]
    assert found.columns["second_moment_masked"] == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert found.gradient == pytest.approx([2 * ratios[0], 0.0, 2 * ratios[2], 0.0, -ratios[4]])


def test_all_tokens_can_be_looked_at() -> None:
    now, sampler = [[-1.0, -1.0, -1.0]], [[-1.1, -2.0, -0.2]]
    found = evaluate_objective(SecondMomentMask(outward_only=False), make_step(now, [2.0], rollout=sampler))
    assert found.columns["second_moment_masked"] == [0.0, 1.0, 1.0]


def test_within_the_limit_nothing_is_masked_however_large_a_single_ratio_is() -> None:
    """One ratio of e among a hundred tokens on the sampler's policy: PPO would clip it, here the mean is 0.01."""
    now, sampler = [[-1.0] * 100], [[-2.0, *[-1.0 - 1e-6] * 99]]
    loss, slope, logged = loss_gradients(M2PO(), make_step(now, [1.0], rollout=sampler))
    assert slope[0] == pytest.approx(-math.e / 100)
    assert logged["second_moment_masked"] == 0.0
    assert logged["second_moment"] == pytest.approx(0.01, rel=1e-6)
    assert loss == pytest.approx(-(math.e + 99) / 100, rel=1e-5)


def test_a_step_without_counted_tokens_is_harmless() -> None:
    found = evaluate_objective(SecondMomentMask(), make_step([[-1.0]], [1.0], rollout=[[-9.0]], kept=[False]))
    assert found.gradient == [0.0]


def test_it_corrects_by_itself() -> None:
    assert M2PO().needs_step_outputs
    assert list(M2PO().validate(Plan(group_size=4, max_staleness=256))) == []
    with pytest.raises(ValueError, match="masks all"):
        SecondMomentMask(limit=0.0)
