"""Each objective's loss and gradient against its paper's formula in plain loops, on every step of ``cases.STEPS``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from conformance import formulas_policy as formulas
from conformance.cases import STEPS, Step
from conformance.compose import part, policy_gradient
from conformance.formulas_common import AGGREGATIONS, Row, Scalar, constant, constant_length
from conformance.harness import Leaves, assert_same, through_formula, through_strop
from conformance.objectives import OBJECTIVES, ObjectiveCase
from support.each import each

STEP = each("step", STEPS.values(), ids=STEPS)


@STEP
@pytest.mark.parametrize("case", OBJECTIVES, ids=str)
def test_an_objective_is_its_papers_formula(case: ObjectiveCase, step: Step) -> None:
    algorithm = policy_gradient(objective=part(case.part, **case.options), aggregation=case.aggregation)
    found = through_strop(algorithm, step, given=True)
    wanted = through_formula(lambda rows: -AGGREGATIONS[case.aggregation](rows, case.terms(rows)), step)
    assert_same(found, wanted)


@STEP
@pytest.mark.parametrize("how", [*AGGREGATIONS, "constant_length"])
def test_an_aggregation_is_its_formula(how: str, step: Step) -> None:
    found = through_strop(policy_gradient(aggregation=how, constant_length=11), step, given=True)
    aggregate: Callable[..., Scalar] = AGGREGATIONS.get(how, lambda rows, terms: constant_length(rows, terms, 11))
    assert_same(found, through_formula(lambda rows: -aggregate(rows, formulas.ppo_clip), step))


@STEP
@pytest.mark.parametrize("options", [{"ratio_to": "sampler"}, {"on_policy_ratio": True}], ids=str)
def test_the_ratio_is_to_the_policy_that_was_asked_for(options: dict[str, Any], step: Step) -> None:
    def moved(row: Row) -> Row:
        older = row.sampler if "ratio_to" in options else [constant(now) for now in row.now]
        return replace(row, before=older)

    found = through_strop(policy_gradient(**options), step, given=True)
    formula = AGGREGATIONS["token_mean"]
    assert_same(found, through_formula(lambda rows: -formula([moved(row) for row in rows], formulas.ppo_clip), step))


@STEP
def test_an_entropy_bonus_is_subtracted_from_the_loss(step: Step) -> None:
    found = through_strop(policy_gradient(entropy_bonus=0.07), step, given=True)

    def loss(rows: list[Row]) -> Scalar:
        token_mean = AGGREGATIONS["token_mean"]
        return -token_mean(rows, formulas.ppo_clip) - 0.07 * token_mean(rows, lambda row: row.entropy)

    assert_same(found, through_formula(loss, step))


@STEP
@pytest.mark.parametrize("objective", ["clip", "sequence_clip"])
def test_the_share_of_clipped_tokens_is_logged(objective: str, step: Step) -> None:
    """Outside the range at all; and where the clip has the smaller term, so that no gradient is left."""
    parts = {"objective": part(objective, low=0.1, high=0.28), "aggregation": "sequence_mean"}
    found = through_strop(policy_gradient(**parts), step, given=True).metrics
    outside, held, tokens = 0, 0, 0
    for row in (row for row in Leaves(step).rows() if row.counts):
        logs = [constant(now) - before for now, before in zip(row.now, row.before, strict=True)]
        if objective == "sequence_clip" and row.length:
            logs = [sum(logs) / row.length] * row.length
        for log in logs:
            tokens += 1
            outside += not math.log(0.9) <= log <= math.log(1.28)
            held += (log > math.log(1.28) and row.advantage[0] > 0) or (log < math.log(0.9) and row.advantage[0] < 0)
    assert found["ratio_outside_clip"] == pytest.approx(outside / tokens, abs=1e-9)
    assert found["ratio_clipped"] == pytest.approx(held / tokens, abs=1e-9)
