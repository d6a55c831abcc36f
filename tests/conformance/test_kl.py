"""The three estimators, in the loss, in the reward and in the token's reward, against their formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import formulas_advantages, formulas_kl, formulas_policy
from conformance.cases import STEPS, Step
from conformance.compose import part, policy_gradient
from conformance.formulas_common import AGGREGATIONS, Row, Scalar, constant
from conformance.harness import (
    EXACT,
    SINGLE,
    Leaves,
    assert_same,
    column,
    groups_of,
    leaf,
    packed,
    through_formula,
    through_strop,
)
from strop.algorithms.kl import KL_WEIGHT, KL_WEIGHT_NEXT, Kl, kl_estimate
from support.each import each

NEAR = {name: step for name, step in STEPS.items() if name != "log ratios of 50"}
STEP = each("step", NEAR.values(), ids=NEAR)
ESTIMATOR = pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
token_mean = AGGREGATIONS["token_mean"]


@STEP
@ESTIMATOR
@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
def test_a_penalty_in_the_loss_is_its_formula(estimator: str, aggregation: str, step: Step) -> None:
    kl = Kl(weight=0.3, estimator=estimator, input_clamp=None, output_clamp=None)
    found = through_strop(policy_gradient(kl=kl, aggregation=aggregation), step, given=True)
    mean = AGGREGATIONS[aggregation]

    def loss(rows: list[Row]) -> Scalar:
        return -mean(rows, formulas_policy.ppo_clip) + 0.3 * mean(rows, partial(formulas_kl.in_loss, estimator=estimator))

    assert_same(found, through_formula(loss, step))


@ESTIMATOR
def test_clamps_bound_the_log_ratio_and_the_estimate(estimator: str) -> None:
    step = NEAR["random, far apart"]
    kl = Kl(weight=0.3, estimator=estimator, input_clamp=0.7, output_clamp=0.2)
    found = through_strop(policy_gradient(kl=kl), step, given=True)

    def loss(rows: list[Row]) -> Scalar:
        terms = partial(formulas_kl.in_loss, estimator=estimator, inside=0.7, outside=0.2)
        return -token_mean(rows, formulas_policy.ppo_clip) + 0.3 * token_mean(rows, terms)

    assert_same(found, through_formula(loss, step))


@STEP
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_an_unbiased_penalty_is_multiplied_by_the_ratio_to_the_sampler(estimator: str, step: Step) -> None:
    kl = Kl(weight=0.3, estimator=estimator, unbiased=True, input_clamp=None, output_clamp=None)
    found = through_strop(policy_gradient(kl=kl), step, given=True)

    def loss(rows: list[Row]) -> Scalar:
        return -token_mean(rows, formulas_policy.ppo_clip) + 0.3 * token_mean(
            rows, partial(formulas_kl.unbiased, estimator=estimator)
        )

    assert_same(found, through_formula(loss, step))


@STEP
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_clamps_of_an_unbiased_penalty_bound_the_product_with_the_ratio(estimator: str, step: Step) -> None:
    kl = Kl(weight=0.3, estimator=estimator, unbiased=True, input_clamp=0.7, output_clamp=0.2)
    found = through_strop(policy_gradient(kl=kl), step, given=True)

    def loss(rows: list[Row]) -> Scalar:
        terms = partial(formulas_kl.unbiased_within, estimator=estimator, inside=0.7, outside=0.2)
        return -token_mean(rows, formulas_policy.ppo_clip) + 0.3 * token_mean(rows, terms)

    assert_same(found, through_formula(loss, step))


@STEP
@ESTIMATOR
def test_a_penalty_in_the_reward_changes_the_rewards_that_a_baseline_sees(estimator: str, step: Step) -> None:
    """Advantages are float32 columns here, so that seven digits are compared."""
    kl = Kl(weight=0.3, estimator=estimator, place="reward", input_clamp=None, output_clamp=None)
    algorithm = policy_gradient(kl=kl, advantage=part("group_relative"), overlong_filtering=False)
    found = algorithm.token_credit(packed(step, algorithm)).advantages
    rows = rows_of(step)
    rewards = iter(formulas_kl.rewards_less_kl(rows, estimator, 0.3))
    wanted = []
    for group in step.groups:
        credit = formulas_advantages.grpo([next(rewards) for _ in group])
        wanted += [advantage for advantage, sample in zip(credit, group, strict=True) for _ in sample.now]
    torch.testing.assert_close(found.double(), torch.tensor(wanted), rtol=SINGLE, atol=SINGLE)


@STEP
@ESTIMATOR
def test_a_penalty_in_each_tokens_reward_is_what_is_still_to_come(estimator: str, step: Step) -> None:
    kl = Kl(weight=0.3, estimator=estimator, place="token_reward", input_clamp=None, output_clamp=None)
    algorithm = policy_gradient(kl=kl, overlong_filtering=False)
    found = algorithm.token_credit(packed(step, algorithm)).advantages
    wanted = [row.reward - 0.3 * penalty for row in rows_of(step) for penalty in formulas_kl.to_come(row, estimator)]
    torch.testing.assert_close(found.double(), torch.tensor(wanted), rtol=SINGLE, atol=SINGLE)


def rows_of(step: Step) -> list[Row]:
    from conformance.harness import Leaves

    return Leaves(step).rows(filtered=False)


LOGS = st.lists(st.floats(-12, -0.01), min_size=1, max_size=5)


@ESTIMATOR
@settings(derandomize=True, deadline=None, max_examples=40)
@given(logs=LOGS, offset=st.floats(-3, 3))
def test_an_estimate_and_its_gradient_are_the_formulas(estimator: str, logs: list[float], offset: float) -> None:
    now, reference = leaf(logs), torch.tensor(logs, dtype=torch.float64) + offset
    found = kl_estimate(now, reference, estimator)
    (gradient,) = torch.autograd.grad(found.sum(), now)
    again = leaf(logs)
    wanted = sum(formulas_kl.ESTIMATORS[estimator](a, b) for a, b in zip(again.unbind(), reference.tolist(), strict=True))
    (other,) = torch.autograd.grad(wanted, again)
    # exp(d) - 1 - d has an error of 1e-16 where d is near 0: the plain formula cancels, Strop's does not
    assert constant(found.sum()) == pytest.approx(constant(wanted), rel=EXACT, abs=1e-14)
    torch.testing.assert_close(gradient, other, rtol=EXACT, atol=1e-14)


def test_k3_keeps_its_digits_where_policies_hardly_differ() -> None:
    """exp(d) - 1 - d in float32 is 0 or residue of 1e-7 at d = 1e-4; d^2/2 is what is wanted."""
    now = torch.tensor([-1.0], dtype=torch.float32)
    found = kl_estimate(now, now + 1e-3, "k3")
    distance = float((now + 1e-3) - now)
    assert float(found) == pytest.approx(distance**2 / 2, rel=1e-2)


def test_at_the_reference_all_estimates_are_zero_and_only_k1_has_a_gradient() -> None:
    """The gradient of k1 is that of log pi, whose expectation is 0; k2's and k3's vanish token by token."""
    for estimator, slope in (("k1", 1.0), ("k2", 0.0), ("k3", 0.0)):
        now = leaf([-0.7, -2.0])
        estimate = kl_estimate(now, now.detach(), estimator)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(estimate.sum(), now)
        assert estimate.tolist() == [0.0, 0.0]
        assert gradient.tolist() == [slope, slope]


def test_unbiased_k3_has_the_gradient_of_the_kl() -> None:
    """Over all tokens of a small vocabulary, with the policy as its own sampler: the expectation of the estimate's gradient is that of
    sum p (log p - log q). k3 in the loss without the ratio has the gradient of the KL the other way round."""
    reference = torch.tensor([0.3, -0.2, 0.9, 0.0], dtype=torch.float64).log_softmax(0)
    logits = leaf([0.1, 0.5, -0.4, 0.2])
    logs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logs.exp() * (logs - reference)).sum(), logits, retain_graph=True)
    ratio = (logs - logs.detach()).exp()
    expected = (logs.detach().exp() * ratio * kl_estimate(logs, reference, "k3")).sum()
    (found,) = torch.autograd.grad(expected, logits, retain_graph=True)
    torch.testing.assert_close(found, exact, rtol=EXACT, atol=1e-12)
    (k2,) = torch.autograd.grad((logs.detach().exp() * kl_estimate(logs, reference, "k2")).sum(), logits)
    torch.testing.assert_close(k2, exact, rtol=EXACT, atol=1e-12)  # k2 in the loss is right on policy


def test_a_far_reference_gives_a_finite_loss() -> None:
    """The default clamps: e^50 must not be in a gradient."""
    step = STEPS["random"].map(lambda one: replace(one, reference=[now + 50.0 for now in one.now]))
    found = through_strop(policy_gradient(kl=Kl()), step, given=True)
    assert math.isfinite(found.value)
    assert bool(found.gradients["logprobs"].abs().max() < 1e3)


def test_groups_are_what_the_harness_says() -> None:
    step = STEPS["random"]
    assert [len(group.rollouts) for group in groups_of(step)] == [len(group) for group in step.groups]


@each("step", [STEPS[name] for name in ("random", "very unequal lengths", "every other rollout masked", "empty completions")])
@pytest.mark.parametrize("place", ["reward", "token_reward"])
@pytest.mark.parametrize("target", [0.01, 0.19, 5.0])
def test_a_weight_that_adapts_is_its_formula_and_holds_from_the_next_batch_on(place: str, target: float, step: Step) -> None:
    kl = Kl(weight=0.1, estimator="k3", place=place, target=target, horizon=50, input_clamp=None, output_clamp=None)  # type: ignore[arg-type]
    subject, fixed = policy_gradient(kl=kl), policy_gradient(kl=replace(kl, target=None))
    rows, weight = Leaves(step).rows(), 0.1
    for _ in range(3):
        batch = packed(step, subject).with_column(KL_WEIGHT, torch.full((len(column(step, "now")),), weight))
        same = replace(fixed, kl=replace(kl, target=None, weight=weight))
        assert torch.equal(subject.token_credit(batch).advantages, same.token_credit(packed(step, same)).advantages)
        report = subject.report(batch)
        assert report["train/kl_weight"] == weight
        weight = formulas_kl.adapted(weight, rows, "k3", target=target, horizon=50)
        assert report[KL_WEIGHT_NEXT] == pytest.approx(weight, rel=1e-12)
        weight = report[KL_WEIGHT_NEXT]


@pytest.mark.parametrize("wrong", [{"target": 0.0}, {"horizon": 0}, {"place": "loss"}, {"weight": 0.0}], ids=str)
def test_a_target_that_nothing_can_adapt_to_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a target adapts the weight of a KL term in the reward"):
        Kl(**{"target": 0.1, "place": "reward", **wrong})
