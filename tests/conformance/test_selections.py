"""Which tokens are trained on at all: against the papers' rules."""

from __future__ import annotations

import pytest
import torch

from conformance import formulas_policy
from conformance.cases import STEPS, Step
from conformance.compose import part, policy_gradient
from conformance.formulas_common import Row, Scalar, constant, token_mean
from conformance.harness import assert_same, leaf, through_formula, through_strop
from strop.algorithms.base import TokenOutputs
from support.each import each

STEP = each("step", STEPS.values(), ids=STEPS)


@STEP
@pytest.mark.parametrize("share", [0.2, 0.5, 1.0, 1e-6])
def test_only_the_tokens_of_largest_entropy_have_a_gradient(share: float, step: Step) -> None:
    """The others still count in the mean."""
    found = through_strop(policy_gradient(selection=part("top_entropy", share=share)), step, given=True)

    def loss(rows: list[Row]) -> Scalar:
        chosen = formulas_policy.top_entropy(rows, share)
        places = {id(row): i for i, row in enumerate(rows)}

        def terms(row: Row) -> list[Scalar]:
            plain = formulas_policy.ppo_clip(row)
            return [plain[t] * float(chosen[places[id(row)], t]) for t in row.tokens]

        return -token_mean(rows, terms)

    assert_same(found, through_formula(loss, step))


def test_an_adaptive_entropy_bonus_is_paid_only_below_its_target() -> None:
    """Skywork-OR1 (2505.22312): alpha where the step's mean entropy is below the target, else 0."""
    step = STEPS["random"]
    entropies = [value for sample in step.samples for value in sample.entropy]
    average = sum(entropies) / len(entropies)

    def loss(rows: list[Row], bonus: float) -> Scalar:
        return -token_mean(rows, formulas_policy.ppo_clip) - bonus * token_mean(rows, lambda row: row.entropy)

    for target, bonus in ((average + 1e-6, 0.05), (average - 1e-6, 0.0)):
        found = through_strop(policy_gradient(entropy_bonus=0.05, entropy_target=target), step, given=True)
        assert_same(found, through_formula(lambda rows, bonus=bonus: loss(rows, bonus), step))


def test_an_approximated_proximal_policy_lies_between_sampler_and_current() -> None:
    """log pi_o = log mu + a (log pi - log mu), without a gradient of its own."""
    from dataclasses import replace

    step = STEPS["random"]
    found = through_strop(policy_gradient(ratio_to="between", proximal_weight=0.3), step, given=True)

    def between(row: Row) -> Row:
        older = [mu + 0.3 * (constant(now) - mu) for now, mu in zip(row.now, row.sampler, strict=True)]
        return replace(row, before=older)

    wanted = through_formula(lambda rows: -token_mean([between(row) for row in rows], formulas_policy.ppo_clip), step)
    assert_same(found, wanted)


def test_ties_in_entropy_do_not_depend_on_the_order_of_rollouts() -> None:
    """All tokens alike: either all are chosen or the choice is arbitrary; Strop's is all."""
    step = STEPS["random"]
    algorithm = policy_gradient(selection=part("top_entropy", share=0.2))
    from conformance.harness import given_advantages, packed

    batch = given_advantages(step, packed(step, algorithm))
    count = len(batch.target)
    outputs = TokenOutputs(leaf([-1.0] * count).detach(), torch.ones(count))
    assert algorithm.prepare_step(batch, outputs).column("selected").tolist() == [1.0] * count
