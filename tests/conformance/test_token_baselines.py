"""Baselines of single tokens, from probabilities of the policy before the update: against their formulas in plain loops."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from conformance import formulas_advantages as formulas
from conformance import formulas_kl, formulas_policy
from conformance.cases import STEPS, Step
from conformance.compose import part, policy_gradient
from conformance.corrections import CORRECTIONS
from conformance.formulas_common import AGGREGATIONS, Row, Scalar
from conformance.harness import SINGLE, Leaves, assert_same, packed, through_formula, through_strop
from strop.algorithms.base import Plan
from strop.algorithms.functional import POLICY_SQUARES
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.step_weights import correct_step
from strop.algorithms.policy_gradient.turns import STEP_ENDS, STEP_REWARDS
from support.each import each

STEP = each("step", STEPS.values(), ids=STEPS)
ZERO_TAIL = pytest.mark.parametrize("zero_tail", [False, True])


def squares(step: Step) -> list[list[float]]:
    """The sum over a vocabulary of p^2, for each token: pi^2, and the rest on two other tokens."""
    draw = random.Random(step.name)
    found = []
    for sample in step.samples:
        each = []
        for before in sample.before:
            rest, share = -math.expm1(before), draw.random()
            each.append(math.exp(before) ** 2 + (share * rest) ** 2 + ((1 - share) * rest) ** 2)
        found.append(each)
    return found


def credited(step: Step, zero_tail: bool, **options: Any) -> list[list[float]]:
    subject = policy_gradient(advantage=part("optimal_token_baseline", zero_tail=zero_tail), overlong_filtering=False, **options)
    column = torch.tensor([math.log(value) for values in squares(step) for value in values])
    batch = subject.token_credit(packed(step, subject).with_column(POLICY_SQUARES, column))
    flat = iter(batch.advantages.tolist())
    return [[next(flat) for _ in sample.now] for sample in step.samples]


def wanted(
    step: Step, returns: Sequence[Sequence[float]], zero_tail: bool, weights: Sequence[Sequence[float]] | None = None
) -> list[list[float]]:
    found: list[list[float]] = []
    for group in step.groups:
        rows = range(len(found), len(found) + len(group))
        found += formulas.optimal_token_baseline(
            [returns[i] for i in rows],
            [step.samples[i].before for i in rows],
            [squares(step)[i] for i in rows],
            [[1.0] * len(returns[i]) if weights is None else weights[i] for i in rows],
            zero_tail=zero_tail,
        )
    return found


def assert_near(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]], step: Step) -> None:
    scale = max((abs(value) for values in expected for value in values), default=0.0)
    for here, there in zip(found, expected, strict=True):
        assert here == pytest.approx(there, rel=1e-5, abs=1e-6 * max(scale, max(abs(one.reward) for one in step.samples)))


@STEP
@ZERO_TAIL
def test_the_optimal_token_baseline_is_its_formula(zero_tail: bool, step: Step) -> None:
    returns = [[sample.reward] * sample.length for sample in step.samples]
    assert_near(credited(step, zero_tail), wanted(step, returns, zero_tail), step)


@ZERO_TAIL
def test_kl_terms_of_later_tokens_are_part_of_the_return(zero_tail: bool) -> None:
    step = STEPS["random"]
    kl = Kl(weight=0.05, estimator="k1", place="token_reward", input_clamp=None, output_clamp=None)
    rows = Leaves(step).rows(filtered=False)
    returns = [[row.reward - 0.05 * penalty for penalty in formulas_kl.to_come(row, "k1")] for row in rows]
    assert_near(credited(step, zero_tail, kl=kl), wanted(step, returns, zero_tail), step)


def test_the_weights_of_a_correction_are_squared_into_the_energy() -> None:
    step = STEPS["random, far apart"]
    returns = [[sample.reward] * sample.length for sample in step.samples]
    weights = [
        [min(math.exp(before - sampler), 1.3) for before, sampler in zip(sample.before, sample.sampler, strict=True)]
        for sample in step.samples
    ]
    found = credited(step, False, corrections=(part("tis", cap=1.3), part("k3_rejection")))
    assert_near(found, wanted(step, returns, False, weights), step)


def test_a_step_that_was_rewarded_is_no_longer_to_come() -> None:
    step = STEPS["random"]
    subject = policy_gradient(advantage=part("optimal_token_baseline"))
    batch = packed(step, subject)
    column = torch.tensor([math.log(value) for values in squares(step) for value in values])
    steps, ends = torch.zeros(2, len(batch.target))
    steps[1], ends[1] = 0.25, 1.0  # the second token of the first rollout
    batch = batch.with_columns({POLICY_SQUARES: column, STEP_REWARDS: steps, STEP_ENDS: ends})
    returns = [[sample.reward] * sample.length for sample in step.samples]
    returns[0][2:] = [value - 0.25 for value in returns[0][2:]]
    found = iter(subject.token_credit(batch).advantages.tolist())
    assert_near([[next(found) for _ in sample.now] for sample in step.samples], wanted(step, returns, False), step)


def test_groups_that_do_not_vary_have_no_credit_with_a_zero_tail_either() -> None:
    step = STEPS["one-sided groups"]
    found = credited(step, True)
    assert [value for values in found[:5] for value in values] == [0.0] * 16
    assert any(value for values in found[5:] for value in values)


def test_rollouts_whose_tokens_were_certain_weigh_nothing() -> None:
    """W is 0 where every token so far had probability 1: the baseline is the other rollout's return."""
    step = STEPS["random"]
    sure = replace(step.groups[0][0], before=[-1e-15] * step.groups[0][0].length)
    certain = replace(step, groups=((sure, *step.groups[0][1:]), *step.groups[1:]))
    assert all(math.isfinite(value) for values in credited(certain, False) for value in values)


# Weights over the whole optimizer step


@STEP
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalised_weights_have_a_mean_of_one(level: str, step: Step) -> None:
    subject = policy_gradient(corrections=(part("tis", cap=1.5, level=level),), normalize_weights=True)
    leaves = Leaves(step)
    mismatch = subject.mismatch(leaves.now, packed(step, subject))
    batch = correct_step(packed(step, subject), mismatch, subject.corrections, normalize=True, rejected_in_divisor=True)
    weights = iter(batch.column("correction_weights").tolist())
    rows = [(row, [next(weights) for _ in row.tokens]) for row in leaves.rows()]
    counted = [(row, values) for row, values in rows if row.counts and row.length]
    plain = [_truncated(row, level) for row, _ in counted]
    means = [sum(values) / len(values) for values in plain] if level == "sequence" else [x for values in plain for x in values]
    mean = sum(means) / len(means)
    for (_, found), own in zip(counted, plain, strict=True):
        assert found == pytest.approx([weight / mean if mean > 1e-8 else weight for weight in own], rel=SINGLE)


def _truncated(row: Row, level: str) -> list[float]:
    logs = [before - sampler for before, sampler in zip(row.before, row.sampler, strict=True)]
    logs = [sum(logs)] * len(logs) if level == "sequence" else logs
    return [min(math.exp(log), 1.5) for log in logs]


def _kept(row: Row, weights: Sequence[float]) -> tuple[Row, list[float]]:
    """The row without its tokens of weight 0."""
    places = [t for t, weight in enumerate(weights) if weight]
    lists = {field.name: getattr(row, field.name) for field in fields(row) if isinstance(getattr(row, field.name), list)}
    return replace(row, **{name: [values[t] for t in places] for name, values in lists.items()}), [weights[t] for t in places]


@STEP
@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@pytest.mark.parametrize(
    "name", ["divergence_rejection estimator=k2 level=token high=0.02", "mis low=0.8 high=1.5", "k3_rejection cap=0.05"]
)
def test_what_is_rejected_leaves_the_divisor(name: str, aggregation: str, step: Step) -> None:
    """The loss of the step without these tokens, and without rollouts of which none is left."""
    case = next(case for case in CORRECTIONS if str(case) == name)
    corrections = (part(case.part, **case.options),)
    subject = policy_gradient(corrections=corrections, rejected_in_divisor=False, aggregation=aggregation)
    stay = replace(subject, rejected_in_divisor=True)

    def loss(rows: list[Row]) -> Scalar:
        kept = [_kept(row, case.weights(row)) for row in rows if row.counts]
        terms = {id(row): [w * x for w, x in zip(own, formulas_policy.ppo_clip(row), strict=True)] for row, own in kept}
        return -AGGREGATIONS[aggregation]([row for row, _ in kept], lambda row: terms[id(row)])

    found = through_strop(subject, step, given=True)
    assert_same(found, through_formula(loss, step))
    cut = through_strop(stay, step, given=True).metrics[f"{case.part}_cut"]
    assert found.metrics[f"{case.part}_cut"] == pytest.approx(cut, abs=1e-6), "over the tokens that counted before"
    assert found.metrics["correction_rejected"] == pytest.approx(cut, abs=1e-6)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"normalize_weights": True, "corrections": ("k3_rejection",)}, "no correction reweights"),
        ({"rejected_in_divisor": False, "corrections": ("tis",)}, "no correction rejects"),
        ({"rejected_in_divisor": False}, "no correction rejects"),
    ],
)
def test_options_of_corrections_that_do_nothing_are_refused(options: dict[str, Any], reason: str) -> None:
    corrections = tuple(part(name) for name in options.pop("corrections", ()))
    subject = policy_gradient(corrections=corrections, **options)
    assert any(reason in problem for problem in subject.validate(Plan(group_size=4)))
