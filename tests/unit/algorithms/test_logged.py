"""What objectives and corrections log, which the formulas of tests/conformance leave open."""

from __future__ import annotations

import math
from typing import Any

import pytest

from strop.algorithm_factory import all_parts
from strop.algorithms.policy_gradient.parts import Correction, Objective
from support.mismatch import log_ratios, make_mismatch
from support.tokens import evaluate_objective, make_step

LOGS = [0.1, 1.0, -0.8, -0.9, 0.7]
"""Log ratios of the policy to the sampler, in a rollout of three tokens with an advantage of 2 and one of two with -1."""
RATIOS = [math.exp(shift) for shift in LOGS]


def gate(ratio: float, tau: float) -> float:
    shut = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return 4 * shut * (1 - shut)


UP, DOWN = math.exp(0.3), math.exp(-0.2)  # products of the rollouts
PHI = [UP**2 * math.exp(3 * (1 - UP))] * 3 + [DOWN**3 * math.exp(2 * (1 - DOWN))] * 2

OBJECTIVES: list[tuple[str, dict[str, Any], dict[str, list[float]]]] = [
    ("clip", {}, {"ratio_outside_clip": [0, 1, 1, 1, 1], "ratio_clipped": [0, 1, 0, 1, 0]}),
    ("sequence_clip", {"low": 0.2, "high": 0.05}, {"ratio_outside_clip": [1, 1, 1, 0, 0], "ratio_clipped": [1, 1, 1, 0, 0]}),
    ("cispo", {"low": 0.2, "high": 0.5}, {"ratio_outside_clip": [0, 1, 1, 1, 1]}),
    ("geometric_mean", {"low": 0.85, "high": 0.65}, {"ratio_outside_clip": [0, 1, 0, 1, 1], "ratio_clipped": [0, 1, 0, 1, 0]}),
    ("second_moment_mask", {}, {"second_moment_masked": [0, 1, 0, 1, 0], "second_moment": [0.01, 1.0, 0.64, 0.81, 0.49]}),
    ("second_moment_mask", {"outward_only": False}, {"second_moment_masked": [0, 1, 1, 1, 1], "probs_ratio": RATIOS}),
    ("soft_gate", {}, {"sapo_gate": [*(gate(ratio, 1.0) for ratio in RATIOS[:3]), *(gate(ratio, 1.05) for ratio in RATIOS[3:])]}),
    ("gamma_weight", {}, {"rollout_weight": PHI, "probs_ratio": [UP] * 3 + [DOWN] * 2}),
    ("tapered", {}, {"topr_weight": [1.0] * 3 + [DOWN] * 2, "topr_tapered": [0, 0, 0, 1, 1]}),
    ("divergence_mask", {"cap": 2.0}, {"divergence_masked": [0, 1, 0, 1, 0], "ratio_capped": [0, 1, 0, 0, 1]}),
    ("divergence_mask", {}, {"divergence": [abs(1 - 1 / ratio) / math.e for ratio in RATIOS], "probs_ratio": RATIOS}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "wanted"), OBJECTIVES)
def test_what_an_objective_logs(name: str, options: dict[str, Any], wanted: dict[str, list[float]]) -> None:
    sampler = [[-1 - shift for shift in LOGS[:3]], [-1 - shift for shift in LOGS[3:]]]
    kind = all_parts()[name]
    assert issubclass(kind, Objective)
    found = evaluate_objective(kind(**options), make_step([[-1.0] * 3, [-1.0] * 2], [2.0, -1.0], old=sampler)).columns
    assert {key: pytest.approx(values, rel=1e-6) for key, values in wanted.items()} == {key: found[key] for key in wanted}


MEANS = [1.2 ** (1 / 3)] * 3 + [2.0] * 2 + [0.6]  # geometric, of the rollouts below


def k3(*ratios: float) -> float:
    return sum(ratio - math.log(ratio) - 1 for ratio in ratios) / len(ratios)


def binary_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


MU = math.exp(-2)
DIVERGENCES = [max(binary_kl(MU, pi), binary_kl(pi, MU)) for pi in (0.4 * MU, 1.0 * MU, 3.0 * MU, 2.0 * MU, 2.0 * MU, 0.6 * MU)]

CORRECTIONS: list[tuple[str, dict[str, Any], dict[str, list[float]]]] = [
    ("importance", {}, {"importance_weight": [0.4, 1.0, 3.0, 2.0, 2.0, 0.6]}),
    ("tis", {"cap": 2.2, "floor": 0.5}, {"tis_weight": [0.5, 1.0, 2.2, 2.0, 2.0, 0.6], "tis_cut": [1, 0, 1, 0, 0, 0]}),
    ("mis", {"low": 0.5, "high": 2.5}, {"mis_weight": [0, 1.0, 0, 2.0, 2.0, 0.6], "mis_cut": [1, 0, 1, 0, 0, 0]}),
    ("icepop", {}, {"icepop_weight": [0, 1.0, 3.0, 2.0, 2.0, 0.6], "icepop_cut": [1, 0, 0, 0, 0, 0]}),
    ("sequence_mask_tis", {"low": 0.5, "high": 1.5, "cap": 2.5}, {"sequence_mask_tis_weight": [0.4, 1.0, 2.5, 0, 0, 0.6],
      "sequence_mask_tis_cut": [0, 0, 0, 1, 1, 0], "sequence_mask_tis_capped": [0, 0, 1, 0, 0, 0], "sequence_mask_tis_ratio": MEANS}),
    ("geometric_rejection", {"low": 0.8, "high": 1.1},
     {"geometric_rejection_cut": [0, 0, 0, 1, 1, 1], "geometric_rejection_ratio": MEANS}),
    ("k3_rejection", {"cap": 0.35}, {"k3_rejection_cut": [1, 1, 1, 0, 0, 0],
     "k3_rejection_divergence": [k3(0.4, 1.0, 3.0)] * 3 + [k3(2.0)] * 2 + [k3(0.6)]}),
    ("divergence_rejection", {"estimator": "k1", "level": "sum", "low": 0.5, "high": 3.0},
     {"divergence_rejection_cut": [0, 0, 0, 1, 1, 0], "divergence_rejection_estimate": [1.2] * 3 + [4.0] * 2 + [0.6]}),
    ("opsm", {"delta": 0.4}, {"opsm_cut": [0, 0, 0, 0, 0, 1], "opsm_divergence": [-math.log(mean) for mean in MEANS]}),
    ("kpop", {"phi": 0.1}, {"kpop_cut": [0, 0, 1, 0, 0, 0], "kpop_divergence": DIVERGENCES}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "wanted"), CORRECTIONS)
def test_what_a_correction_logs(name: str, options: dict[str, Any], wanted: dict[str, list[float]]) -> None:
    rows = (log_ratios(0.4, 1.0, 3.0), log_ratios(2.0, 2.0), log_ratios(0.6))
    kind = all_parts()[name]
    assert issubclass(kind, Correction)
    _, logged = kind(**options).weights(make_mismatch(*rows, credit=[-1.0, 1.0, -1.0], rollout_logprob=-2.0))
    assert {key: pytest.approx(values, rel=1e-6, abs=1e-9) for key, values in wanted.items()} == {
        key: column.tolist() for key, column in logged.items()
    }
