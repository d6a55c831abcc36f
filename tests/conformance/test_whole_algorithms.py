"""Every policy-gradient algorithm as its name alone gives it, from rewards to gradient, against one formula; and what all share."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from conformance.cases import STEPS, Step
from conformance.compose import algorithm, part
from conformance.formulas_common import constant
from conformance.harness import Leaves, Outcome, assert_same, column, groups_of, packed, single_precision, through_strop
from conformance.whole import WHOLE, Whole
from strop.algorithms.base import Algorithm
from strop.algorithms.kl import Kl
from support.each import each

NAME = pytest.mark.parametrize("name", WHOLE)
STEP = each("step", STEPS.values(), ids=STEPS)


def made(name: str, **options: Any) -> Algorithm:
    """The algorithm with its defaults; truncated rollouts do not count."""
    given = {key: part(value[0], **value[1]) if isinstance(value, tuple) else value for key, value in WHOLE[name].options.items()}
    return algorithm(name, **{"overlong_filtering": True, **given, **options})


def takes(name: str, step: Step) -> Step | None:
    """The step as the algorithm takes it; None where it is not for it."""
    if name == "maxrl":
        return step.map(lambda one: replace(one, reward=abs(one.reward)))
    if name == "gdpo" and any(not sample.length for sample in step.samples):
        return None  # the batch's deviation is over rollouts with tokens
    if name == "distillation" and step.name in ("log ratios of 50", "huge rewards"):
        return None
    return step


@cache
def through_whole(name: str, step: str) -> Outcome:
    """What Strop makes of a step that the algorithm takes, by their names."""
    taken = takes(name, STEPS[step])
    assert taken is not None
    return through_strop(made(name), taken)


@STEP
@NAME
def test_an_algorithm_is_its_papers_formula_from_rewards_to_gradient(name: str, step: Step) -> None:
    """To 1e-9 where all columns are float64, to 1e-5 where credit is rounded to float32."""
    whole: Whole = WHOLE[name]
    taken = takes(name, step)
    if taken is None:
        pytest.skip("not for this step")
    leaves = Leaves(taken)
    value = whole(leaves.rows(), taken)
    loose = whole.single
    assert_same(
        through_whole(name, step.name),
        Outcome(constant(value), leaves.gradients(value)),
        rtol=1e-5 if loose else 1e-9,
        atol=1e-6 if loose else 1e-9,
    )


IN_SINGLE = ["random", "very unequal lengths", "one-sided groups", "empty completions", "every other rollout masked", "on policy"]


@NAME
@each("at", IN_SINGLE)
def test_an_algorithm_is_its_formula_in_float32_too(name: str, at: str) -> None:
    """The types of a run: float32 columns and outputs, float64 rewards."""
    taken = takes(name, STEPS[at])
    if taken is None:
        pytest.skip("not for this step")
    with single_precision():
        found = through_strop(made(name), taken)
    assert found.gradients["logprobs"].dtype == torch.float32
    leaves = Leaves(taken)
    value = WHOLE[name](leaves.rows(), taken)
    wanted = leaves.gradients(value)
    found = replace(found, gradients={key: gradient.double() for key, gradient in found.gradients.items()})
    assert_same(found, Outcome(constant(value), wanted), rtol=1e-4, atol=1e-6)


@STEP
@NAME
def test_rollouts_that_are_idle_have_no_gradient(name: str, step: Step) -> None:
    """They are read without a backward pass: a gradient they had would be lost."""
    taken = takes(name, step)
    if taken is None:
        pytest.skip("not for this step")
    subject = made(name)
    batch = subject.token_credit(packed(taken, subject))
    idle = subject.zero_gradient(batch)[batch.sequence]
    found = through_whole(name, step.name).gradients
    assert not found["logprobs"][idle].any()
    assert not found["entropy"][idle].any()


@STEP
@pytest.mark.parametrize(
    "options",
    [
        {"kl": Kl(weight=0.1)},
        {"kl": Kl(weight=0.1, place="token_reward")},
        {"entropy_bonus": 0.1},
        {"entropy_bonus": 0.1, "entropy_target": 1.0},
        {"positive_nll": 0.1},
        {"selection": part("top_entropy")},
        {"corrections": (part("icepop"),)},
    ],
    ids=lambda options: ", ".join(options),
)
def test_rollouts_that_are_idle_have_no_gradient_whatever_else_is_in_the_loss(options: dict[str, Any], step: Step) -> None:
    subject = made("grpo", **options)
    batch = subject.token_credit(packed(step, subject))
    idle = subject.zero_gradient(batch)[batch.sequence]
    found = through_strop(subject, step).gradients
    assert not found["logprobs"][idle].any()
    assert not found["entropy"][idle].any()


@NAME
def test_the_loss_that_is_logged_is_the_loss(name: str) -> None:
    taken = takes(name, STEPS["random"])
    assert taken is not None
    found = through_strop(made(name), taken)
    assert found.metrics["loss"] == found.value


@NAME
def test_gradients_do_not_depend_on_what_filtered_rollouts_say(name: str) -> None:
    """The log-probabilities of a rollout that does not count are in no mean, no rank and no threshold."""
    taken = takes(name, STEPS["every other rollout masked"])
    assert taken is not None
    wild = taken.map(lambda one: replace(one, now=[-30.0] * one.length, entropy=[99.0] * one.length) if one.truncated else one)
    counts = ~torch.tensor([sample.truncated for sample in taken.samples for _ in sample.now])
    plain, other = through_strop(made(name), taken), through_strop(made(name), wild)
    assert other.value == pytest.approx(plain.value, rel=1e-12)
    torch.testing.assert_close(other.gradients["logprobs"][counts], plain.gradients["logprobs"][counts])
    assert not other.gradients["logprobs"][~counts].any()


@NAME
def test_a_step_without_any_rollout_that_counts_has_no_gradient(name: str) -> None:
    taken = takes(name, STEPS["random"].map(lambda one: replace(one, truncated=True)))
    assert taken is not None
    found = through_strop(made(name), taken)
    assert found.value == 0.0
    assert not found.gradients["logprobs"].any()


@NAME
def test_one_optimizer_step_needs_no_scoring_pass(name: str) -> None:
    """Without the column of the learner before the update, the current policy stands in for it."""
    step = takes(name, STEPS["random"].map(lambda one: replace(one, before=one.now)))
    assert step is not None
    scored = through_strop(made(name), step)
    alone = through_strop(
        made(name),
        step,
        prepare=lambda batch: replace(batch, columns={k: v for k, v in batch.columns.items() if k != "policy_logprobs"}),
    )
    assert_same(alone, scored, rtol=1e-12)


def test_dynamic_sampling_drops_the_groups_without_signal() -> None:
    def kept(name: str, step: Step, **options: Any) -> list[bool]:
        subject = made(name, **options)
        return [subject.keep(group if subject.greedy_baseline else replace(group, baseline=None)) for group in groups_of(step)]

    one_sided = replace(STEPS["one-sided groups"], greedy=(0.0, 0.0, 1.0))
    assert kept("dapo", one_sided) == [False, False, True]
    assert kept("grpo", one_sided) == [True, True, True]
    assert kept("dapo", STEPS["float residue"]) == [False, True]
    assert kept("remax", one_sided, drop_constant_groups=True) == [True, False, True], "the greedy rollout is compared with"


def test_covariance_clipping_at_random_takes_as_many_tokens_of_the_band() -> None:
    """Which ones is a draw; the same step draws the same."""
    step = STEPS["very unequal lengths"]
    options = {"share": 0.1, "lowest": 0.01, "highest": 9.0}
    largest, drawn, again = (
        through_strop(made("clip_cov", objective=part("covariance_clip", choose=choose, **options)), step, given=True)
        for choose in ("largest", "uniform", "uniform")
    )
    plain = through_strop(made("grpo"), step, given=True).gradients["logprobs"]
    lost = [(plain != 0) & (found.gradients["logprobs"] == 0) for found in (largest, drawn)]
    assert int(lost[0].sum()) == int(lost[1].sum()) == int(0.1 * len(plain))
    assert torch.equal(drawn.gradients["logprobs"], again.gradients["logprobs"])
    advantages = torch.tensor([sample.advantage for sample in step.samples for _ in sample.now])
    logs = column(step, "now")
    covariance = (logs - logs.mean()) * (advantages - advantages.mean())
    assert bool(((covariance[lost[1]] > 0.01) & (covariance[lost[1]] < 9.0)).all())
