"""PPO with a critic: GAE, returns, whitening, the value loss and the report, against their formulas in plain loops."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from conformance import formulas_advantages, formulas_kl, formulas_policy
from conformance import formulas_critic as formulas
from conformance.cases import STEPS, Step, on_policy, step
from conformance.compose import algorithm, part
from conformance.formulas_common import AGGREGATIONS, Row, Scalar, constant
from conformance.harness import SINGLE, Leaves, Outcome, assert_same, packed, through_formula, through_strop
from strop.algorithms.kl import Kl
from strop.types import Batch
from support.each import each

NEAR = {name: one for name, one in STEPS.items() if name not in ("log ratios of 50", "huge rewards")}
STEP = each("step", NEAR.values(), ids=NEAR)
GAE = [
    {},
    {"gamma": 0.9, "lambda_policy": 0.8},
    {"gamma": 1.0, "lambda_policy": 0.95, "lambda_value": 1.0},
    {"lambda_policy": 0.0},
    {"lambda_policy": 1.0},
    {"length_adaptive_alpha": 0.5, "lambda_value": 1.0},
    {"length_adaptive_alpha": 0.05, "lambda_value": 1.0},
]


def credited(one: Step, gae: dict[str, Any], **options: Any) -> Batch:
    """With truncated rollouts filtered."""
    subject = algorithm("ppo", advantage=part("gae", **gae), overlong_filtering=True, **options)
    return subject.token_credit(packed(one, subject))


def rows_of(one: Step) -> list[Row]:
    return Leaves(one).rows()


def estimated(
    row: Row, *, gamma: float = 1.0, lambda_policy: float = 0.95, lambda_value: float | None = None, length_adaptive_alpha: float = 0.0,
    penalties: list[float] | None = None,
) -> tuple[list[float], list[float]]:  # fmt: skip
    """Advantages, not whitened, and returns of one rollout."""
    rewards = formulas.token_rewards(row, penalties)
    lam = formulas.length_adaptive(row.length, length_adaptive_alpha) if length_adaptive_alpha and row.length else lambda_policy
    advantages = formulas.gae(rewards, row.value, gamma=gamma, lam=lam)
    targets = formulas.gae(rewards, row.value, gamma=gamma, lam=lam if lambda_value is None else lambda_value)
    return advantages, formulas.returns(targets, row.value)


def compare(found: torch.Tensor, wanted: list[list[float]], rows: list[Row]) -> None:
    """The tokens that count; seven digits, as the columns are float32."""
    counts = torch.tensor([row.counts for row in rows for _ in row.tokens])
    flat = torch.tensor([number for numbers in wanted for number in numbers])
    torch.testing.assert_close(found.double()[counts], flat[counts], rtol=SINGLE, atol=SINGLE)


@STEP
@pytest.mark.parametrize("gae", GAE, ids=str)
def test_advantages_and_returns_are_generalised_advantage_estimation(gae: dict[str, Any], step: Step) -> None:
    batch = credited(step, {**gae, "whiten": False})
    rows = rows_of(step)
    compare(batch.advantages, [estimated(row, **gae)[0] for row in rows], rows)
    compare(batch.column("returns"), [estimated(row, **gae)[1] for row in rows], rows)


@STEP
@pytest.mark.parametrize("gae", GAE[:3], ids=str)
def test_whitening_is_over_the_tokens_that_count_and_leaves_returns_alone(gae: dict[str, Any], step: Step) -> None:
    batch = credited(step, gae)
    rows = rows_of(step)
    plain = [estimated(row, **gae)[0] for row in rows]
    counting = [number for row, numbers in zip(rows, plain, strict=True) if row.counts for number in numbers]
    white = iter(formulas_advantages.whiten(counting))
    wanted = [[next(white) if row.counts else 0.0 for _ in numbers] for row, numbers in zip(rows, plain, strict=True)]
    counts = torch.tensor([row.counts for row in rows for _ in row.tokens])
    flat = torch.tensor([number for numbers in wanted for number in numbers])
    torch.testing.assert_close(batch.advantages.double()[counts], flat[counts], rtol=1e-5, atol=1e-5)
    compare(batch.column("returns"), [estimated(row, **gae)[1] for row in rows], rows)


@STEP
def test_unbiased_whitening_divides_by_the_deviation_with_bessels_correction(step: Step) -> None:
    """As NeMo-RL, verl and TRL: sqrt(sum of squares / (n - 1) + 1e-8)."""
    batch = credited(step, {"deviation": "unbiased"})
    rows = rows_of(step)
    plain = [number for row in rows if row.counts for number in estimated(row)[0]]
    middle = sum(plain) / len(plain)
    spread = math.sqrt(sum((number - middle) ** 2 for number in plain) / (len(plain) - 1) + 1e-8)
    counts = torch.tensor([row.counts for row in rows for _ in row.tokens])
    wanted = torch.tensor([(number - middle) / spread for number in plain])
    torch.testing.assert_close(batch.advantages.double()[counts], wanted, rtol=1e-5, atol=1e-5)


@STEP
@pytest.mark.parametrize("place", ["token_reward", "reward"])
def test_a_kl_penalty_is_taken_from_rewards_before_gae(place: str, step: Step) -> None:
    kl = Kl(weight=0.1, estimator="k1", place=place, input_clamp=None, output_clamp=None)  # type: ignore[arg-type]
    batch = credited(step, {"whiten": False}, kl=kl)
    rows = rows_of(step)
    wanted = []
    for row in rows:
        each = [0.1 * formulas_kl.k1(now, before) for now, before in zip(row.before, row.reference, strict=True)]
        penalties = each if place == "token_reward" else [0.0] * (row.length - 1) + [sum(each)] * bool(row.length)
        wanted.append(estimated(row, penalties=[float(number) for number in penalties]))
    compare(batch.advantages, [advantages for advantages, _ in wanted], rows)
    compare(batch.column("returns"), [targets for _, targets in wanted], rows)


@STEP
@pytest.mark.parametrize("clip", [None, 0.2, 0.01])
@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_the_value_loss_is_its_formula(clip: float | None, scale: float, step: Step) -> None:
    options = {"value_clip": clip, "value_scale": scale, "overlong_filtering": True}
    subject = algorithm("ppo", advantage=part("gae", whiten=False), **options)

    def exact(batch: Batch) -> Batch:
        targets = [number for row in rows_of(step) for number in estimated(row)[1]]
        return batch.with_column("returns", torch.tensor(targets))

    found = through_strop(subject, step, learner="value", prepare=exact)

    def loss(rows: list[Row]) -> Scalar:
        terms = lambda row: formulas.value_loss(row, estimated(row)[1], cliprange=clip)  # noqa: E731
        return scale * AGGREGATIONS["token_mean"](rows, terms)

    assert_same(found, through_formula(loss, step))


@STEP
def test_the_policy_loss_is_ppos(step: Step) -> None:
    subject = algorithm("ppo", overlong_filtering=True)
    found = through_strop(subject, step, given=True)
    loss = lambda rows: -AGGREGATIONS["token_mean"](rows, formulas_policy.ppo_clip)  # noqa: E731
    assert_same(found, through_formula(loss, step))


@STEP
def test_ppo_goes_from_rewards_to_gradient_by_its_formulas(step: Step) -> None:
    """With its defaults: lambda 0.95, gamma 1, whitened advantages. Seven digits, as credit is a float32 column."""
    if "ratios" in step.name:
        pytest.skip("seven digits of an advantage times e^5 cancel to nothing")
    found = through_strop(algorithm("ppo", overlong_filtering=True), step)
    leaves = Leaves(step)
    rows = leaves.rows()
    plain = [estimated(row)[0] for row in rows]
    counting = [number for row, numbers in zip(rows, plain, strict=True) if row.counts for number in numbers]
    white = iter(formulas_advantages.whiten(counting))
    credited = [replace(row, advantage=[next(white) if row.counts else 0.0 for _ in row.tokens]) for row in rows]
    value = -AGGREGATIONS["token_mean"](credited, formulas_policy.ppo_clip)
    assert_same(found, Outcome(constant(value), leaves.gradients(value)), rtol=1e-4, atol=1e-6)


def test_vapo_adds_the_likelihood_of_correct_rollouts() -> None:
    one = step("correct and wrong", [[3, 2, 4], [2, 5]], [[1, 0, 1], [0, 1]])
    found = through_strop(algorithm("vapo"), one, given=True)

    def loss(rows: list[Row]) -> Scalar:
        token_mean = AGGREGATIONS["token_mean"]
        correct = [row for row in rows if row.reward > 0]
        imitation = token_mean(correct, lambda row: [-now for now in row.now])
        return -token_mean(rows, partial(formulas_policy.ppo_clip, low=0.2, high=0.28)) + 0.1 * imitation

    assert_same(found, through_formula(loss, one))


def test_a_critic_alone_trains_during_its_warm_up() -> None:
    subject = algorithm("vapo")
    assert set(subject.losses(0)) == set(subject.losses(49)) == {"value"}
    assert set(subject.losses(50)) == {"policy", "value"}


def test_the_explained_variance_is_its_formula() -> None:
    one = STEPS["random"]
    subject = algorithm("ppo")
    batch = subject.token_credit(packed(one, subject))
    values = [number for row in rows_of(one) for number in row.value]
    targets = [number for row in rows_of(one) for number in estimated(row)[1]]
    reported = {name.rsplit("/", 1)[-1]: value for name, value in subject.report(batch).items()}
    assert reported["explained_variance"] == pytest.approx(formulas.explained_variance(values, targets), rel=1e-5)


def test_lambda_1_and_gamma_1_is_the_reward_to_go_less_the_value() -> None:
    rows = rows_of(STEPS["random"])
    batch = credited(STEPS["random"], {"lambda_policy": 1.0, "whiten": False})
    compare(batch.advantages, [[row.reward - value for value in row.value] for row in rows], rows)


def test_lambda_0_is_one_step_of_temporal_difference() -> None:
    rows = rows_of(STEPS["random"])
    batch = credited(STEPS["random"], {"lambda_policy": 0.0, "gamma": 0.9, "whiten": False})
    wanted = [formulas.temporal_differences(formulas.token_rewards(row), row.value, 0.9) for row in rows]
    compare(batch.advantages, wanted, rows)


def test_a_perfect_critic_leaves_nothing_to_learn() -> None:
    one = STEPS["random"].map(lambda sample: replace(sample, value=[sample.reward] * sample.length))
    assert credited(one, {"whiten": False}).advantages.abs().max() < 1e-12
    assert credited(one, {}).advantages.abs().max() == 0.0, "whitening makes nothing of rounding"


def test_thousands_of_tokens_are_the_loop_too() -> None:
    one = on_policy(step("long", [[3000], [2]]))
    rows = rows_of(one)
    gae = {"gamma": 0.999, "lambda_policy": 0.95}
    batch = credited(one, {**gae, "whiten": False})
    wanted = []
    for row in rows:
        backwards, after, rewards = [], 0.0, formulas.token_rewards(row)
        values = [*row.value, 0.0]
        for t in reversed(row.tokens):
            after = rewards[t] + 0.999 * values[t + 1] - values[t] + 0.999 * 0.95 * after
            backwards.append(after)
        wanted.append(backwards[::-1])
    compare(batch.advantages, wanted, rows)
