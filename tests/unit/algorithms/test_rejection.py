"""Corrections that only keep or drop: rollouts by their geometric mean, by k3 or by credit (OPSM), tokens by a binary KL (KPop)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strop.algorithms.policy_gradient.corrections.divergence_rejection import DivergenceRejection
from strop.algorithms.policy_gradient.corrections.kpop import Kpop
from strop.algorithms.policy_gradient.corrections.opsm import Opsm
from strop.algorithms.policy_gradient.corrections.rejection import GeometricRejection, K3Rejection
from strop.algorithms.policy_gradient.parts import Correction, Mismatch
from support.mismatch import log_ratios, make_mismatch


def found_by(correction: Correction, mismatch: Mismatch) -> tuple[list[float], dict[str, list[float]]]:
    weights, logged = correction.weights(mismatch)
    return weights.tolist(), {name: column.tolist() for name, column in logged.items()}


def test_geometric_rejection_keeps_whole_rollouts_whose_mean_ratio_is_in_the_band() -> None:
    mismatch = make_mismatch(log_ratios(4.0, 0.25, 1.0), log_ratios(1.2, 1.2), log_ratios(0.7))
    kept, logged = found_by(GeometricRejection(low=0.8, high=1.1), mismatch)
    assert kept == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert logged["geometric_rejection_cut"] == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    assert logged["geometric_rejection_ratio"] == pytest.approx([1.0] * 3 + [1.2] * 2 + [0.7])


def test_geometric_rejection_does_not_depend_on_length() -> None:
    """At 1.0005 a token a product leaves every band as rollouts grow; the mean stays."""
    mismatch = make_mismatch([math.log(1.0005)] * 3, [math.log(1.0005)] * 3000)
    assert set(found_by(GeometricRejection(), mismatch)[0]) == {1.0}


def test_k3_rejection_sees_what_cancels_in_a_mean_of_logarithms() -> None:
    mismatch = make_mismatch(log_ratios(4.0, 0.25), log_ratios(1.05, 1.0))
    kept, logged = found_by(K3Rejection(cap=0.1), mismatch)
    assert kept == [0.0, 0.0, 1.0, 1.0]
    first = ((4.0 - math.log(4.0) - 1) + (0.25 - math.log(0.25) - 1)) / 2
    second = (1.05 - math.log(1.05) - 1) / 2
    assert logged["k3_rejection_divergence"] == pytest.approx([first] * 2 + [second] * 2, rel=1e-9)
    assert set(found_by(GeometricRejection(low=0.8, high=1.1), mismatch)[0]) == {1.0}


def test_opsm_drops_failures_the_policy_moved_away_from_and_nothing_else() -> None:
    """log mu - log pi: 0.5 a token in the first three rollouts, which differ in their credit; -0.5 in the last."""
    mismatch = make_mismatch([-0.5, -0.5], [-0.9, -0.1], [-0.5], [0.5], credit=[-1.0, 1.0, 0.0, -1.0])
    kept, logged = found_by(Opsm(delta=0.4), mismatch)
    assert kept == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert logged["opsm_divergence"] == pytest.approx([0.5] * 5 + [-0.5])
    assert set(found_by(Opsm(delta=0.6), mismatch)[0]) == {1.0}


def test_opsm_weighs_counted_tokens_only() -> None:
    """Rollout 0 does not count in the loss, so that nothing of it is logged as dropped either."""
    mismatch = make_mismatch([-9.0], [-9.0], credit=[-1.0, -1.0], kept=[False, True])
    assert found_by(Opsm(delta=0.4), mismatch)[0] == [1.0, 0.0]


def binary_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


@given(mu=st.floats(0.001, 0.999), pi=st.floats(0.001, 0.999))
def test_kpop_compares_the_larger_of_the_two_binary_divergences(mu: float, pi: float) -> None:
    """The sampler's log-probabilities are float32 columns, which is where the tolerance comes from."""
    mismatch = make_mismatch([math.log(pi / mu)], rollout_logprob=math.log(mu))
    _, logged = found_by(Kpop(), mismatch)
    wanted = max(binary_kl(mu, pi), binary_kl(pi, mu))
    assert logged["kpop_divergence"][0] == pytest.approx(wanted, rel=1e-3, abs=1e-6)


def test_kpop_lets_an_unlikely_token_differ_by_more_than_a_likely_one() -> None:
    """The same ratio of 0.5, from 0.01 to 0.005 and from 0.9 to 0.45."""
    assert found_by(Kpop(), make_mismatch(log_ratios(0.5), rollout_logprob=math.log(0.01)))[0] == [1.0]
    assert found_by(Kpop(), make_mismatch(log_ratios(0.5), rollout_logprob=math.log(0.9)))[0] == [0.0]


def test_kpop_does_not_take_rounding_near_certainty_for_a_divergence() -> None:
    """The sampler's float32 says exactly 1 and the learner's 1 - 1e-6: the plain formula divides by zero."""
    kept, logged = found_by(Kpop(), make_mismatch([-1e-6, 0.0], rollout_logprob=0.0))
    assert kept == [1.0, 1.0]
    assert logged["kpop_divergence"][1] == 0.0
    assert logged["kpop_divergence"][0] < 1e-4


def test_the_default_bounds_keep_a_sampler_and_a_learner_that_agree() -> None:
    mismatch = make_mismatch([1e-6, -1e-6, 0.0], [0.0], credit=[-1.0, 1.0], dtype=torch.float32)
    for correction in (GeometricRejection(), K3Rejection(), Opsm(), Kpop()):
        assert set(found_by(correction, mismatch)[0]) == {1.0}, correction


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (GeometricRejection, {"low": 1.2}, r"the geometric mean of w is kept in \[1.2, 1.001\]"),
        (K3Rejection, {"cap": 0.0}, "every other rollout would be dropped"),
        (Opsm, {"delta": -0.1}, "delta is -0.1"),
        (Kpop, {"phi": 0.0}, "phi is 0.0"),
    ],
)
def test_bounds_that_drop_everything_are_refused(kind: type[Correction], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"high": 0.0}, "k3 is never negative"),
        ({"low": 0.5}, "k3 is never negative"),
        ({"estimator": "k1"}, "where sampler and learner agree exp\\(k1\\) is 1, and would be rejected"),
        ({"estimator": "k1", "low": 2.0, "high": 1.0}, "contains no ratio of probabilities"),
        ({"estimator": "k1", "level": "max", "low": 0.5, "high": 2.0}, "k1 has both signs"),
    ],
    ids=str,
)
def test_bounds_that_an_estimate_cannot_meet_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DivergenceRejection(**options)
