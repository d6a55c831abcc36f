"""Each correction's weights against its formula in plain loops, and what they do to a loss."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from conformance import formulas_corrections as formulas
from conformance import formulas_policy
from conformance.cases import STEPS, Sample, Step
from conformance.compose import part, policy_gradient
from conformance.corrections import CORRECTIONS, CorrectionCase, logs
from conformance.formulas_common import AGGREGATIONS, Row
from conformance.harness import (
    EXACT,
    Leaves,
    Outcome,
    assert_same,
    column,
    given_advantages,
    packed,
    through_formula,
    through_strop,
)
from strop.algorithms.policy_gradient.parts import Mismatch
from support.each import each

STEP = each("step", STEPS.values(), ids=STEPS)
CASE = pytest.mark.parametrize("case", CORRECTIONS, ids=str)
BY_NAME = {str(case): case for case in CORRECTIONS}


def weights_of(case: CorrectionCase, step: Step) -> torch.Tensor:
    algorithm = policy_gradient()
    batch = given_advantages(step, packed(step, algorithm))
    log_ratio, now = (column(step, name) - column(step, "sampler") for name in ("before", "now"))
    mismatch = Mismatch(log_ratio=log_ratio, current_log_ratio=now, advantages=batch.advantages, batch=batch)
    found, _ = part(case.part, **case.options).weights(mismatch)
    assert isinstance(found, torch.Tensor)
    return found


@STEP
@CASE
def test_weights_are_their_formula(case: CorrectionCase, step: Step) -> None:
    found = iter(weights_of(case, step).tolist())
    for row in Leaves(step).rows():
        each = [next(found) for _ in row.tokens]
        assert all(map(math.isfinite, each))
        if row.counts:  # the tokens of a filtered rollout have a weight that nobody uses
            assert each == pytest.approx(case.weights(row), rel=EXACT, abs=1e-300)


@cache
def corrected(case: str, step: str) -> Outcome:
    """What Strop makes of a correction and a step, by their names."""
    one = BY_NAME[case]
    return through_strop(policy_gradient(corrections=(part(one.part, **one.options),)), STEPS[step], given=True)


@STEP
@CASE
def test_a_corrected_loss_is_the_objective_times_the_weights(case: CorrectionCase, step: Step) -> None:
    """Denominators stay: a token with weight 0 still counts in the mean."""
    found = corrected(str(case), step.name)

    def weighed(row: Row) -> list[object]:
        return [weight * term for weight, term in zip(case.weights(row), formulas_policy.ppo_clip(row), strict=True)]

    assert_same(found, through_formula(lambda rows: -AGGREGATIONS["token_mean"](rows, weighed), step))  # type: ignore[arg-type]


def test_two_corrections_multiply() -> None:
    """Decoupled PPO with rejection of far rollouts."""
    step = STEPS["random"]
    first, second = BY_NAME["tis cap=1.1"], BY_NAME["geometric_rejection low=0.9 high=1.1"]
    parts = tuple(part(case.part, **case.options) for case in (first, second))
    found = through_strop(policy_gradient(corrections=parts), step, given=True)

    def weighed(row: Row) -> list[object]:
        return [
            a * b * term
            for a, b, term in zip(first.weights(row), second.weights(row), formulas_policy.ppo_clip(row), strict=True)
        ]

    assert_same(found, through_formula(lambda rows: -AGGREGATIONS["token_mean"](rows, weighed), step))  # type: ignore[arg-type]


def impossible(one: Sample) -> Sample:
    """The sampler drew what the learner finds impossible, and what it finds certain the sampler hardly drew."""
    return replace(
        one,
        before=[-1e4 if t % 2 else -1e-12 for t in range(one.length)],
        sampler=[-1e-12 if t % 2 else -1e4 for t in range(one.length)],
    )


@CASE
def test_impossible_tokens_give_finite_weights_and_a_finite_loss(case: CorrectionCase) -> None:
    step = STEPS["random"].map(impossible)
    assert bool(weights_of(case, step).isfinite().all())
    within = step.map(lambda one: replace(one, before=one.now))
    found = through_strop(policy_gradient(corrections=(part(case.part, **case.options),)), within, given=True)
    assert math.isfinite(found.value)
    assert bool(found.gradients["logprobs"].isfinite().all())


@CASE
def test_where_sampler_and_learner_agree_every_weight_is_one(case: CorrectionCase) -> None:
    step = STEPS["on policy"]
    found = weights_of(case, step)
    assert found.tolist() == [1.0] * len(found)


@STEP
@CASE
def test_what_was_cut_is_logged(case: CorrectionCase, step: Step) -> None:
    """Means over the tokens that count: of the weight, and of whether it is another than the plain ratio or, for rejections, than 1."""
    found = corrected(str(case), step.name).metrics
    rows = [row for row in Leaves(step).rows() if row.counts]
    weights = [weight for row in rows for weight in case.weights(row)]
    at_sequences = case.options.get("level") == "sequence"
    plain = [
        weight
        for row in rows
        for weight in (formulas.sequence_importance(logs(row)) if at_sequences else formulas.importance(logs(row)))
    ]
    if f"{case.part}_weight" in found:
        assert found[f"{case.part}_weight"] == pytest.approx(sum(weights) / len(weights), rel=1e-6)
    if f"{case.part}_cut" in found:
        cut = [weight != ratio if case.part == "tis" else weight == 0 for weight, ratio in zip(weights, plain, strict=True)]
        assert found[f"{case.part}_cut"] == pytest.approx(sum(cut) / len(cut), abs=1e-6)
    assert {f"{case.part}_weight", f"{case.part}_cut"} & set(found)
