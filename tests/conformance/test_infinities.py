"""Policies that find a sampled token impossible: their log-probability is -inf, and no loss or gradient may be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from conformance.cases import STEPS, Sample
from conformance.compose import part, policy_gradient
from conformance.harness import through_strop
from conformance.objectives import OBJECTIVES, ObjectiveCase
from strop.algorithms.kl import Kl

NEVER = -math.inf


def impossible(one: Sample, column: str) -> Sample:
    """Every third token of the rollout is one that the policy of ``column`` finds impossible."""
    return replace(one, **{column: [NEVER if t % 3 == 0 else old for t, old in enumerate(getattr(one, column))]})  # type: ignore[arg-type]


@pytest.mark.parametrize("case", OBJECTIVES, ids=str)
@pytest.mark.parametrize("column", ["sampler", "before", "now"])
@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_a_token_of_probability_0_under_one_policy_gives_a_finite_loss_and_gradient(
    case: ObjectiveCase, column: str, sign: float
) -> None:
    step = STEPS["random"].map(lambda one: replace(impossible(one, column), advantage=sign * one.advantage))
    algorithm = policy_gradient(objective=part(case.part, **case.options), aggregation=case.aggregation, kl=Kl(unbiased=True))
    found = through_strop(algorithm, step, given=True)
    assert math.isfinite(found.value)
    assert bool(found.gradients["logprobs"].isfinite().all())
    assert all(math.isfinite(value) for value in found.metrics.values()), found.metrics


@pytest.mark.parametrize("case", OBJECTIVES, ids=str)
@pytest.mark.parametrize("column", ["sampler", "before", "reference"])
def test_a_filtered_rollout_contributes_exactly_nothing_also_if_it_is_impossible(case: ObjectiveCase, column: str) -> None:
    """An infinity times a mask of 0 would be a nan."""
    step = STEPS["every other rollout masked"]
    broken = step.map(lambda one: impossible(one, column) if one.truncated else one)
    algorithm = policy_gradient(objective=part(case.part, **case.options), aggregation=case.aggregation, kl=Kl(unbiased=True))
    found, plain = (through_strop(algorithm, each, given=True) for each in (broken, step))
    assert found.value == plain.value
    assert torch.equal(found.gradients["logprobs"], plain.gradients["logprobs"])
