"""SFT, preference losses, KTO and reward models against their formulas in plain loops."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from conformance import formulas_preferences as formulas
from conformance.cases import PAIRS, STEPS, Step, step
from conformance.compose import algorithm
from conformance.formulas_common import Row, Scalar, constant
from conformance.harness import Outcome, assert_same, groups_of, leaf, single_precision, through_formula, through_strop
from conformance.preferences import PAIR_LOSSES, PairCase
from strop.algorithms.base import ValueOutputs
from support.each import each
from support.rollouts import pack_for

PAIR_STEP = each("step", PAIRS.values(), ids=PAIRS)
TAUGHT = {name: one.map(lambda sample: replace(sample, truncated=False)) for name, one in STEPS.items()}
BETA = 0.1


def paired(rows: list[Row]) -> list[formulas.Pair]:
    return list(zip(rows[::2], rows[1::2], strict=True))


@PAIR_STEP
@pytest.mark.parametrize("case", PAIR_LOSSES, ids=str)
def test_a_pair_loss_is_its_papers_formula(case: PairCase, step: Step) -> None:
    found = through_strop(algorithm(case.algorithm, **case.options), step)
    wanted = through_formula(lambda rows: formulas.over_pairs(paired(rows), case.loss), step)
    assert_same(found, wanted, atol=1e-11)
    assert found.metrics["loss"] == pytest.approx(wanted.value, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("case", PAIR_LOSSES, ids=str)
@pytest.mark.parametrize("at", ["random pairs", "very unequal lengths", "at the start"])
def test_a_pair_loss_is_its_formula_in_float32_too(case: PairCase, at: str) -> None:
    with single_precision():
        found = through_strop(algorithm(case.algorithm, **case.options), PAIRS[at])
    wanted = through_formula(lambda rows: formulas.over_pairs(paired(rows), case.loss), PAIRS[at])
    found = replace(found, gradients={name: gradient.double() for name, gradient in found.gradients.items()})
    assert_same(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", [case for case in PAIR_LOSSES if case.at_start is not None], ids=str)
def test_where_policy_and_reference_agree_the_loss_is_known(case: PairCase) -> None:
    found = through_strop(algorithm(case.algorithm, **case.options), PAIRS["at the start"])
    assert found.value == pytest.approx(case.at_start, abs=1e-12)


@pytest.mark.parametrize("case", PAIR_LOSSES, ids=str)
def test_swapping_a_pair_is_swapping_its_completions(case: PairCase) -> None:
    """No place in the batch is special but the order within a pair."""
    plain = PAIRS["random pairs"]
    swapped = replace(plain, groups=tuple(reversed(plain.groups)))
    one, other = (through_strop(algorithm(case.algorithm, **case.options), each).value for each in (plain, swapped))
    assert one == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize("case", PAIR_LOSSES, ids=str)
def test_a_pair_with_an_empty_completion_is_harmless(case: PairCase) -> None:
    found = through_strop(algorithm(case.algorithm, **case.options), step("empty", [[3, 0], [2, 2]], [[1, 0]] * 2))
    assert math.isfinite(found.value)
    assert bool(found.gradients["logprobs"].isfinite().all())


@pytest.mark.parametrize("case", PAIR_LOSSES, ids=str)
def test_a_pair_that_is_impossibly_far_apart_is_finite(case: PairCase) -> None:
    far = PAIRS["random pairs"].map(lambda one: replace(one, now=[-2000.0 * (1 + t) for t in range(one.length)]))
    found = through_strop(algorithm(case.algorithm, **case.options), far)
    assert math.isfinite(found.value)
    assert bool(found.gradients["logprobs"].isfinite().all())


@PAIR_STEP
@pytest.mark.parametrize("how", ["sequence_sum", "sequence_mean", "token_mean"])
def test_an_sft_term_beside_dpo_is_the_nll_of_the_chosen(how: str, step: Step) -> None:
    options = {"beta": BETA, "preference_weight": 0.7, "sft_weight": 0.3, "sft_aggregation": how}
    found = through_strop(algorithm("dpo", **options), step)

    def loss(rows: list[Row]) -> Scalar:
        pairs = paired(rows)
        chosen = [pair[0] for pair in pairs]
        sft = {
            "sequence_sum": lambda: formulas.sft_on_chosen(pairs, averaged=False),
            "sequence_mean": lambda: formulas.nll(chosen, per_sequence=True),
            "token_mean": lambda: formulas.nll(chosen),
        }[how]()
        return 0.7 * formulas.over_pairs(pairs, partial(formulas.dpo, beta=BETA)) + 0.3 * sft

    assert_same(found, through_formula(loss, step))


@PAIR_STEP
@pytest.mark.parametrize("beta, smoothing", [(0.1, 0.0), (2.0, 0.2)])
@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_optimal_transport_is_its_formula_over_the_whole_step(name: str, beta: float, smoothing: float, step: Step) -> None:
    found = through_strop(algorithm(name, beta=beta, label_smoothing=smoothing), step)
    formula = {"aot": formulas.aot, "aot_unpaired": formulas.aot_unpaired}[name]
    assert_same(found, through_formula(lambda rows: formula(paired(rows), beta=beta, smoothing=smoothing), step), atol=1e-11)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
@each("rollouts", STEPS.values(), ids=STEPS)
def test_online_dpo_compares_the_best_with_the_worst_of_each_group(kind: str, rollouts: Step) -> None:
    counted = TAUGHT[rollouts.name]
    found = through_strop(algorithm("online_dpo", beta=BETA, loss_type=kind), counted)

    def loss(rows: list[Row]) -> Scalar:
        groups = [[row for row in rows if row.group == place] for place in range(len(counted.groups))]
        return formulas.best_against_worst(groups, beta=BETA, kind=kind)

    assert_same(found, through_formula(loss, counted), atol=1e-11)


# Supervised fine-tuning


@each("step", TAUGHT.values(), ids=TAUGHT)
@pytest.mark.parametrize("how", ["token_mean", "sequence_mean"])
def test_sft_is_the_negative_log_likelihood(how: str, step: Step) -> None:
    found = through_strop(algorithm("sft", aggregation=how), step)
    assert_same(found, through_formula(lambda rows: formulas.nll(rows, per_sequence=how == "sequence_mean"), step))


@each("step", TAUGHT.values(), ids=TAUGHT)
def test_dynamic_fine_tuning_weighs_each_token_by_its_probability(step: Step) -> None:
    assert_same(through_strop(algorithm("sft", dft=True), step), through_formula(formulas.dft, step))


# KTO


def judged_steps() -> dict[str, Step]:
    plain = {name: one for name, one in PAIRS.items() if name != "margins"}
    return {
        **plain,
        "mixed": step("mixed", [[3, 2], [4, 5], [1, 6], [2, 2]], [[1, 0], [0, 0], [1, 0], [0, 0]]),
        "all undesirable": step("all undesirable", [[3, 2], [4, 5]], [[0, 0], [0, 0]]),
        "below the reference": PAIRS["random pairs"].map(lambda one: replace(one, reference=[x + 1.0 for x in one.now])),
        "above the reference": PAIRS["random pairs"].map(lambda one: replace(one, reference=[x - 1.0 for x in one.now])),
    }


JUDGED = judged_steps()


@each("step", JUDGED.values(), ids=JUDGED)
@pytest.mark.parametrize("desirable, undesirable", [(1.0, 1.0), (1.33, 0.8)])
def test_kto_is_its_papers_formula(desirable: float, undesirable: float, step: Step) -> None:
    options = {"beta": BETA, "desirable_weight": desirable, "undesirable_weight": undesirable}
    found = through_strop(algorithm("kto", **options), step)

    def loss(rows: list[Row]) -> Scalar:
        return formulas.kto(rows[::2], rows[1::2], beta=BETA, desirable=desirable, undesirable=undesirable)

    assert_same(found, through_formula(loss, step))


@each("step", JUDGED.values(), ids=JUDGED)
@pytest.mark.parametrize("desirable, undesirable", [(1.0, 1.0), (1.33, 0.8)])
def test_apo_zero_of_judgements_is_its_papers_formula(desirable: float, undesirable: float, step: Step) -> None:
    options = {"beta": BETA, "desirable_weight": desirable, "undesirable_weight": undesirable}
    found = through_strop(algorithm("apo_zero_unpaired", **options), step)

    def loss(rows: list[Row]) -> Scalar:
        return formulas.apo_zero_unpaired(rows[::2], beta=BETA, desirable=desirable, undesirable=undesirable)

    assert_same(found, through_formula(loss, step))


def test_kto_at_the_start_is_half() -> None:
    assert through_strop(algorithm("kto"), PAIRS["at the start"]).value == pytest.approx(0.5, abs=1e-12)


# Reward models

SCORES = {
    "random": [0.3, -1.2, 2.5, 0.9, -0.4, 0.0],
    "equal": [1.5] * 6,
    "far apart": [400.0, -400.0, -400.0, 400.0, 1e4, 0.0],
    "far from zero": [1e3, 1e3 - 0.5, -1e3, -1e3 + 2.0, 0.0, 1.0],
}


def score(options: dict[str, object], scores: list[float], one: Step) -> Outcome:
    subject = algorithm("reward_model", **options)
    batch = pack_for(groups_of(one), subject)
    assert len(batch.target) == len(scores), "one place for each rollout: its end"
    values = leaf(scores)
    batch = subject.prepare_step(subject.token_credit(batch), None)
    loss, metrics = subject.losses(0)["policy"](ValueOutputs(values), batch)
    (gradient,) = torch.autograd.grad(loss, values)
    return Outcome(constant(loss), {"scores": gradient}, {name: metric.value for name, metric in metrics.items()})


def formula_of_scores(scores: list[float], one: Step, margin: bool, centering: float) -> Outcome:
    values = leaf(scores)
    total: Scalar = 0.0
    for place, (chosen, rejected) in enumerate(one.groups):
        gap = chosen.reward - rejected.reward if margin else 0.0
        total = total + formulas.bradley_terry(values[2 * place], values[2 * place + 1], margin=gap, centering=centering)
    total = total / len(one.groups)
    assert isinstance(total, torch.Tensor)
    (gradient,) = torch.autograd.grad(total, values)
    return Outcome(constant(total), {"scores": gradient})


@each("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("margin", [False, True])
@pytest.mark.parametrize("centering", [0.0, 0.01])
def test_a_reward_model_is_bradley_terry(scores: list[float], margin: bool, centering: float) -> None:
    one = PAIRS["margins"]
    found = score({"use_margin": margin, "centering": centering}, scores, one)
    assert_same(found, formula_of_scores(scores, one, margin, centering))


def test_a_reward_model_that_knows_nothing_has_log_2() -> None:
    assert score({}, SCORES["equal"], PAIRS["margins"]).value == pytest.approx(math.log(2), abs=1e-12)


def test_a_regression_is_the_squared_distance_to_the_reward() -> None:
    one, scores = PAIRS["margins"], SCORES["random"]
    found = score({"kind": "regression"}, scores, one)
    errors = [value - sample.reward for value, sample in zip(scores, one.samples, strict=True)]
    assert found.value == pytest.approx(sum(error**2 for error in errors) / 6, rel=1e-12)
    assert found.gradients["scores"].tolist() == pytest.approx([2 * error / 6 for error in errors], rel=1e-12)
