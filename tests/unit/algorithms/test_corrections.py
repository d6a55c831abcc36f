"""What holds for every correction: without gradient, harmless where nothing differs, and the same however a batch is cut."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from strop.algorithm_factory import all_parts
from strop.algorithms.base import TokenOutputs
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.corrections import GeometricRejection, K3Rejection, Kpop, Opsm
from strop.algorithms.policy_gradient.parts import Correction, Mismatch
from strop.data.splitting import split_micro_batches
from support.algorithms import grpo
from support.drawn import check_draws
from support.mismatch import make_mismatch
from support.rollouts import make_groups, pack_grpo, shapes_to_cut

EXACT = 1e-12


REWEIGHTING = {
    "importance": [{}, {"level": "sequence"}],
    "tis": [{}, {"cap": 1.1, "floor": 0.9}, {"level": "sequence"}],
    "mis": [{}, {"low": 0.8, "high": 1.2}, {"low": 0.1, "high": 9.0, "level": "sequence"}],
    "icepop": [{}, {"low": 0.9, "high": 1.3}],
    "sequence_mask_tis": [{}, {"low": 0.9, "high": 1.2, "cap": 1.1}],
}


DROPPING = {
    "geometric_rejection": [{}, {"low": 0.9, "high": 1.2}],
    "k3_rejection": [{}, {"cap": 0.05}],
    "divergence_rejection": [
        {},
        {"estimator": "k1", "level": "sum", "low": 0.5, "high": 2.0},
        {"estimator": "k1", "level": "token", "low": 0.9, "high": 1.2},
        {"estimator": "k2", "level": "max", "high": 0.1},
        {"level": "sum", "high": 0.1},
    ],
    "opsm": [{"delta": 0.0}, {}],
    "kpop": [{"phi": 0.02}, {}],
}


CORRECTIONS = [
    pytest.param(name, options, id=f"{name}-{place}")
    for name, all_options in {**REWEIGHTING, **DROPPING}.items()
    for place, options in enumerate(all_options)
]


def correction_of(name: str, options: dict[str, Any]) -> Correction:
    kind = all_parts()[name]
    assert issubclass(kind, Correction)
    return kind(**options)


def test_every_correction_of_the_package_is_tested_here() -> None:
    assert {name for name, kind in all_parts().items() if issubclass(kind, Correction)} == {*REWEIGHTING, *DROPPING}


@pytest.mark.parametrize(("name", "options"), CORRECTIONS)
def test_it_can_be_made_without_options_and_says_whether_it_reweights(name: str, options: dict[str, Any]) -> None:
    assert correction_of(name, {}).reweights == correction_of(name, options).reweights == (name in REWEIGHTING)


@pytest.mark.parametrize(("name", "options"), CORRECTIONS)
def test_rollouts_that_do_not_count_change_nothing_and_do_no_harm(name: str, options: dict[str, Any]) -> None:
    shown = make_mismatch([0.1, -0.2], [math.nan, math.inf], [0.3], credit=[-1.0, 1.0, 1.0], kept=[True, False, True])
    alone = make_mismatch([0.1, -0.2], [0.3], credit=[-1.0, 1.0])
    correction = correction_of(name, options)
    weights, columns = correction.weights(shown)
    wanted, _ = correction.weights(alone)
    assert torch.equal(weights[torch.tensor([0, 1, 4])], wanted)
    assert all(bool(torch.isfinite(column).all()) for column in (weights, *columns.values()))


def gradient_of(
    algorithm: PolicyGradient, batch: Any, logprobs: torch.Tensor, budget: int
) -> tuple[torch.Tensor, dict[str, float]]:
    """d loss / d log-probability of every token [N], added up over micro-batches, and the metrics likewise."""
    leaf = logprobs.clone().requires_grad_()
    metrics: dict[str, float] = {}
    for part in split_micro_batches(batch, budget):
        own = leaf[part.index]
        loss, logged = algorithm.loss(TokenOutputs(own, torch.zeros_like(own)), part.batch)
        loss.backward()
        for key, metric in logged.items():
            metrics[key] = metrics.get(key, 0.0) + metric.value
    assert leaf.grad is not None
    return leaf.grad, metrics


@pytest.mark.parametrize(("name", "options"), CORRECTIONS)
def test_the_gradient_is_the_same_however_the_batch_is_cut(name: str, options: dict[str, Any]) -> None:
    sure = {"shapes": shapes_to_cut(rollouts=4), "budget": st.integers(8, 48), "seed": st.integers(0, 5)}
    check_draws(f"{name} {options}", 3, partial(assert_one_gradient, name, options), simplest=False, **sure)


def assert_one_gradient(name: str, options: dict[str, Any], shapes: Any, budget: int, seed: int) -> None:
    algorithm = replace(grpo(), corrections=(correction_of(name, options),))
    batch = pack_grpo(make_groups(shapes, seed))
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(batch.target), generator=generator, dtype=torch.float64)
    batch = batch.with_column("policy_logprobs", batch.rollout_logprobs.double() + 0.2 * noise)
    logprobs = batch.column("policy_logprobs") + 0.1 * noise.flip(0)
    wanted, whole = gradient_of(algorithm, batch, logprobs, 10**9)
    found, cut = gradient_of(algorithm, batch, logprobs, budget)
    assert torch.allclose(found, wanted, atol=EXACT)
    for key in whole:
        if key.startswith(name):
            assert cut[key] == pytest.approx(whole[key], abs=1e-6), key


def test_what_is_dropped_still_counts_in_what_the_loss_is_divided_by() -> None:
    """Two rollouts of two tokens, one of them dropped: the gradient of the other stays a quarter of its credit."""
    shown = make_mismatch([0.0, 0.0], [0.9, 0.9], credit=[1.0, 1.0])
    algorithm = replace(grpo(), corrections=(correction_of("geometric_rejection", {}),))
    learner = shown.batch.rollout_logprobs.double() + shown.log_ratio
    batch = shown.batch.with_column("policy_logprobs", learner)
    found, metrics = gradient_of(algorithm, batch, learner, 10**9)
    assert found.tolist() == pytest.approx([-0.25, -0.25, 0.0, 0.0])
    assert metrics["geometric_rejection_cut"] == pytest.approx(0.5)


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


def test_opsm_drops_failures_that_the_policy_moved_away_from_and_nothing_else() -> None:
    """log mu - log pi: 0.5 a token in the first three rollouts, which differ in their credit; -0.5 in the last."""
    mismatch = make_mismatch([-0.5, -0.5], [-0.9, -0.1], [-0.5], [0.5], credit=[-1.0, 1.0, 0.0, -1.0])
    kept = [found_by(Opsm(delta=delta), mismatch)[0] for delta in (0.4, 0.6)]
    assert kept == [[0.0, 0.0, 1.0, 1.0, 1.0, 1.0], [1.0] * 6]
