"""Corrections that only keep or drop: rollouts by their geometric mean, by k3 or by credit (OPSM), tokens by a binary KL (KPop)."""

from __future__ import annotations

import torch

from strop.algorithms.policy_gradient.corrections.kpop import Kpop
from strop.algorithms.policy_gradient.corrections.opsm import Opsm
from strop.algorithms.policy_gradient.corrections.rejection import GeometricRejection, K3Rejection
from strop.algorithms.policy_gradient.parts import Correction, Mismatch
from support.mismatch import make_mismatch


def found_by(correction: Correction, mismatch: Mismatch) -> tuple[list[float], dict[str, list[float]]]:
    weights, logged = correction.weights(mismatch)
    return weights.tolist(), {name: column.tolist() for name, column in logged.items()}


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
