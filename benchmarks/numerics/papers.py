"""Strop against the papers' formulas as plain Python loops over rollouts and tokens, taken from the conformance tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from conformance import formulas_kl, formulas_policy
from conformance import formulas_preferences as preference_formulas
from conformance.advantages import GROUP_ADVANTAGES, GroupCase
from conformance.cases import PAIRS, REWARDS, STEPS, Step
from conformance.compose import algorithm, part, policy_gradient
from conformance.corrections import CORRECTIONS, CorrectionCase
from conformance.formulas_common import AGGREGATIONS, Scalar, constant, constant_length
from conformance.formulas_common import Row as Rollout
from conformance.harness import Leaves, Outcome, through_formula, through_strop
from conformance.objectives import OBJECTIVES, ObjectiveCase
from conformance.preferences import PAIR_LOSSES, PairCase
from conformance.test_whole_algorithms import made, takes
from conformance.whole import WHOLE
from numerics.sections import FLOAT_BOUNDS, FLOATS, Numbers, Row, Section, over_steps, tensor_difference
from strop.algorithms.base import Algorithm
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.parts import GroupRewards

PAPER = "the paper's loop"
Loss = Callable[[list[Rollout]], Scalar]
NAMES = ("random", "very unequal lengths", "single tokens", "one-sided groups", "every other rollout masked", "on policy")
USUAL = [STEPS[name] for name in NAMES]
PAIRED = [PAIRS[name] for name in ("random pairs", "one pair", "single tokens", "very unequal lengths", "at the start")]
token_mean = AGGREGATIONS["token_mean"]


def row(option: str, subject: Callable[[], Algorithm], loss: Loss, *, given: bool = True, steps: list[Step] = USUAL) -> Row:
    """``given``: with the samples' own advantages, past credit."""
    return Row(
        option,
        PAPER,
        lambda: over_steps(lambda step: through_strop(subject(), step, given=given), partial(through_formula, loss), steps),
    )


def objective_rows() -> Iterator[Row]:
    for case in OBJECTIVES:

        def loss(rows: list[Rollout], case: ObjectiveCase = case) -> Scalar:
            return -AGGREGATIONS[case.aggregation](rows, case.terms(rows))

        def subject(case: ObjectiveCase = case) -> Algorithm:
            return policy_gradient(objective=part(case.part, **case.options), aggregation=case.aggregation)

        yield row(f"{case}, {case.aggregation}", subject, loss)


def aggregation_rows() -> Iterator[Row]:
    for how in [*AGGREGATIONS, "constant_length"]:
        mean: Callable[..., Scalar] = AGGREGATIONS.get(how, lambda rows, terms: constant_length(rows, terms, 11))
        yield row(
            f"clip, {how}",
            partial(policy_gradient, aggregation=how, constant_length=11),
            lambda rows, mean=mean: -mean(rows, formulas_policy.ppo_clip),
        )
    yield row(
        "clip, entropy_bonus=0.07",
        partial(policy_gradient, entropy_bonus=0.07),
        lambda rows: -token_mean(rows, formulas_policy.ppo_clip) - 0.07 * token_mean(rows, lambda one: one.entropy),
    )


def kl_rows() -> Iterator[Row]:
    free = {"input_clamp": None, "output_clamp": None}
    terms: list[tuple[dict[str, Any], Callable[..., Any]]] = [
        ({"estimator": name, **free}, partial(formulas_kl.in_loss, estimator=name)) for name in ("k1", "k2", "k3", "abs")
    ]
    terms += [
        ({"estimator": name, "unbiased": True, **free}, partial(formulas_kl.unbiased, estimator=name)) for name in ("k1", "k3")
    ]
    clamps = {"input_clamp": 0.7, "output_clamp": 0.2}
    terms += [
        ({"estimator": name, **clamps}, partial(formulas_kl.in_loss, estimator=name, inside=0.7, outside=0.2))
        for name in ("k1", "k2", "k3")
    ]
    for options, term in terms:
        named = " ".join(f"{name}={value}" for name, value in options.items())
        yield row(
            f"kl in the loss, {named}",
            partial(policy_gradient, kl=Kl(weight=0.3, **options)),
            lambda rows, term=term: -token_mean(rows, formulas_policy.ppo_clip) + 0.3 * token_mean(rows, term),
        )


def correction_rows() -> Iterator[Row]:
    for case in CORRECTIONS:

        def loss(rows: list[Rollout], case: CorrectionCase = case) -> Scalar:
            def weighed(one: Rollout) -> list[Scalar]:
                weights = case.weights(one) if one.length else []
                return [weight * term for weight, term in zip(weights, formulas_policy.ppo_clip(one), strict=True)]

            return -token_mean(rows, weighed)

        def subject(case: CorrectionCase = case) -> Algorithm:
            return policy_gradient(corrections=(part(case.part, **case.options),))

        yield row(f"correction {case}", subject, loss)


def advantage_rows() -> Iterator[Row]:
    for case in GROUP_ADVANTAGES:
        yield Row(f"advantage {case}", PAPER, partial(credit_difference, case))


def credit_difference(case: GroupCase) -> Numbers:
    """Credit has no gradient, and is float64 in a run too."""
    worst = 0.0
    for rewards in REWARDS.values():
        taken = [abs(reward) for reward in rewards] if case.success else rewards
        lengths = [1.0 + place % 5 for place in range(len(taken))]
        group = GroupRewards(
            rewards=torch.tensor(taken, dtype=torch.float64),
            lengths=torch.tensor(lengths, dtype=torch.float64),
            greedy_reward=0.5,
        )
        found = part(case.part, **case.options).rollout_advantages(group)
        worst = max(worst, tensor_difference(found, torch.tensor(case.formula(taken, lengths, 0.5), dtype=torch.float64)))
    return worst, None, None, None


def preference_rows() -> Iterator[Row]:
    def paired(rows: list[Rollout]) -> list[preference_formulas.Pair]:
        return list(zip(rows[::2], rows[1::2], strict=True))

    for case in PAIR_LOSSES:

        def loss(rows: list[Rollout], case: PairCase = case) -> Scalar:
            return preference_formulas.over_pairs(paired(rows), case.loss)

        def subject(case: PairCase = case) -> Algorithm:
            return algorithm(case.algorithm, **case.options)

        yield row(str(case), subject, loss, given=False, steps=PAIRED)
    for name, formula in (("aot", preference_formulas.aot), ("aot_unpaired", preference_formulas.aot_unpaired)):
        yield row(
            f"{name} beta=0.1",
            partial(algorithm, name, beta=0.1),
            lambda rows, formula=formula: formula(paired(rows), beta=0.1, smoothing=0.0),
            given=False,
            steps=PAIRED,
        )
    yield row(
        "kto beta=0.1",
        partial(algorithm, "kto", beta=0.1),
        lambda rows: preference_formulas.kto(rows[::2], rows[1::2], beta=0.1, desirable=1.0, undesirable=1.0),
        given=False,
        steps=PAIRED,
    )
    for how in ("token_mean", "sequence_mean"):
        yield row(
            f"sft {how}",
            partial(algorithm, "sft", aggregation=how),
            lambda rows, how=how: preference_formulas.nll(rows, per_sequence=how == "sequence_mean"),
            given=False,
            steps=PAIRED,
        )
    yield row("sft dft", partial(algorithm, "sft", dft=True), preference_formulas.dft, given=False, steps=PAIRED)


def whole_rows() -> Iterator[Row]:
    for name in WHOLE:
        yield Row(f"algorithm {name}, from rewards to gradient", PAPER, partial(whole_difference, name))


def whole_difference(name: str) -> Numbers:
    def peer(step: Step) -> Outcome:
        leaves = Leaves(step)
        value = WHOLE[name](leaves.rows(), step)
        return Outcome(constant(value), leaves.gradients(value))

    steps = [taken for step in USUAL if (taken := takes(name, step)) is not None]
    return over_steps(lambda step: through_strop(made(name), step), peer, steps)


def papers() -> Section:
    return Section(
        "The papers' loops",
        "Every objective, aggregation, KL term, correction, advantage and preference loss, and every policy gradient with its "
        "default options, compared with its formula as a loop over rollouts and tokens in float64. The worst of five or six "
        "optimizer steps: groups of one sign, single tokens, lengths from 1 to 33, masked rollouts, on policy. Whole algorithms "
        "round credit to float32, like a run.",
        FLOATS,
        (1e-6, 1e-6, *FLOAT_BOUNDS[2:]),
        (
            *objective_rows(),
            *aggregation_rows(),
            *kl_rows(),
            *correction_rows(),
            *advantage_rows(),
            *preference_rows(),
            *whole_rows(),
        ),
    )
