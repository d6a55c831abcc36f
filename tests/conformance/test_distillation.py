"""Distillation: the per-token advantage, and divergences on the teacher's k tokens, against their formulas in plain loops."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from conformance import formulas_advantages, formulas_policy
from conformance import formulas_distillation as formulas
from conformance.cases import STEPS, Step, on_policy
from conformance.compose import algorithm, part
from conformance.formulas_common import AGGREGATIONS, Row, Scalar, constant
from conformance.harness import SINGLE, Candidates, Leaves, Outcome, assert_same, column, groups_of, packed, through_strop
from strop.types import Batch, Group
from support.each import each

STEP = each("step", STEPS.values(), ids=STEPS)


# On-policy distillation: the teacher in the advantage


@STEP
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_the_teachers_advantage_is_its_formula(weight: float, step: Step) -> None:
    """A_t = log pi_T - log mu, and a share of GRPO's advantage; seven digits, as the column is float32."""
    subject = algorithm("distillation", advantage=part("reverse_kl", reward_weight=weight))
    found = subject.token_credit(packed(step, subject)).advantages.double()
    wanted: list[float] = []
    for group in step.groups:
        credit = formulas_advantages.grpo([sample.reward for sample in group])
        for sample, advantage in zip(group, credit, strict=True):
            wanted += [
                teacher - before + weight * advantage for teacher, before in zip(sample.teacher, sample.before, strict=True)
            ]
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=SINGLE, atol=SINGLE)


@STEP
def test_its_loss_is_the_clipped_objective_of_that_advantage(step: Step) -> None:
    if step.name in ("log ratios of 50", "huge rewards"):
        pytest.skip("an advantage of 50 nats times a ratio of e^50: seven digits of it say nothing")
    found = through_strop(algorithm("distillation", overlong_filtering=True), step)
    leaves = Leaves(step)

    def credited(row: Row) -> Row:
        return replace(row, advantage=[teacher - before for teacher, before in zip(row.teacher, row.before, strict=True)])

    value = -AGGREGATIONS["token_mean"]([credited(row) for row in leaves.rows()], formulas_policy.ppo_clip)
    assert_same(found, Outcome(constant(value), leaves.gradients(value)), rtol=1e-5, atol=1e-7)


def test_a_student_that_is_its_teacher_learns_nothing() -> None:
    found = through_strop(algorithm("distillation"), on_policy(STEPS["random"]))
    assert found.value == 0.0
    assert found.gradients["logprobs"].abs().max() == 0.0


# Divergences on the teacher's k tokens

Divergence = Callable[[list[Scalar], list[Scalar]], Scalar]
KINDS: dict[str, tuple[dict[str, object], Divergence]] = {
    "forward": ({"kl_type": "forward"}, formulas.forward),
    "reverse": ({"kl_type": "reverse"}, formulas.reverse),
    "mixed, half": ({"kl_type": "mixed"}, partial(formulas.mixed, weight=0.5)),
    "mixed, mostly forward": ({"kl_type": "mixed", "mixed_kl_weight": 0.9}, partial(formulas.mixed, weight=0.9)),
    "jsd": ({"kl_type": "jsd"}, partial(formulas.jsd, beta=0.5)),
    "jsd, near the student": ({"kl_type": "jsd", "beta": 0.1}, partial(formulas.jsd, beta=0.1)),
    "jsd, near the teacher": ({"kl_type": "jsd", "beta": 0.9}, partial(formulas.jsd, beta=0.9)),
}
KIND = pytest.mark.parametrize("kind", KINDS)
OUTSIDE: dict[str, Callable[[list[Scalar]], list[Scalar]]] = {"renormalise": formulas.renormalised, "bucket": formulas.with_rest}


@dataclass(frozen=True)
class Distributions:
    """How a case draws teacher and student: logits of a vocabulary of ``size``, of which the teacher's top ``k`` are seen."""

    size: int = 9
    k: int = 4
    sharpness: float = 1.5
    same: bool = False

    def __call__(self, step: Step) -> Candidates:
        draw = random.Random(step.name)
        count = sum(sample.length for sample in step.samples)
        teacher = self._rows(draw, count)
        student = teacher if self.same else self._rows(draw, count)
        logs, ids = teacher.topk(self.k)
        return Candidates(ids, logs, student.gather(1, ids))

    def _rows(self, draw: random.Random, count: int) -> Tensor:  # [N, size]
        rows = [[draw.gauss(0.0, self.sharpness) for _ in range(self.size)] for _ in range(count)]
        return torch.tensor(rows, dtype=torch.float64).reshape(count, self.size).log_softmax(-1)


DRAWN = {
    "top 4 of 9": Distributions(),
    "the top one": Distributions(k=1),
    "sharp": Distributions(sharpness=8.0),
    "teacher and student agree": Distributions(same=True),
    "nearly everything": Distributions(size=9, k=8),
}


FORMULAS = [
    pytest.param(kind, outside, aggregation, marks=[] if (place + other) % len(AGGREGATIONS) == third else pytest.mark.exhaustive)
    for place, kind in enumerate(KINDS)
    for other, outside in enumerate(OUTSIDE)
    for third, aggregation in enumerate(AGGREGATIONS)  # in `make test` one for each kind and what becomes of the other tokens
]


@pytest.mark.parametrize(("kind", "outside", "aggregation"), FORMULAS)
@each("drawn", DRAWN.values(), ids=DRAWN)
def test_a_divergence_on_the_top_k_is_its_formula(kind: str, outside: str, drawn: Distributions, aggregation: str) -> None:
    one = STEPS["random"]
    options, divergence = KINDS[kind]
    candidates = drawn(one)
    subject = algorithm("topk_distillation", outside=outside, aggregation=aggregation, **options)
    found = through_strop(subject, one, candidates=candidates)
    leaves = Leaves(one, candidates)
    assert leaves.candidates is not None
    places = iter(zip(candidates.teacher.tolist(), [list(row.unbind()) for row in leaves.candidates.unbind()], strict=True))

    def terms(row: Row) -> list[Scalar]:
        each = [next(places) for _ in row.tokens]
        return [divergence(OUTSIDE[outside](list(teacher)), OUTSIDE[outside](list(student))) for teacher, student in each]

    value = AGGREGATIONS[aggregation](leaves.rows(), terms)
    assert_same(found, Outcome(constant(value), leaves.gradients(value)), atol=1e-10)


@KIND
@pytest.mark.parametrize("outside", OUTSIDE)
def test_a_divergence_is_zero_with_no_gradient_where_the_two_agree(kind: str, outside: str) -> None:
    subject = algorithm("topk_distillation", outside=outside, **KINDS[kind][0])
    found = through_strop(subject, STEPS["random"], candidates=DRAWN["teacher and student agree"](STEPS["random"]))
    assert found.value == pytest.approx(0.0, abs=1e-12)
    assert found.gradients["candidates"].abs().max() < 1e-12


@KIND
@pytest.mark.parametrize("outside", OUTSIDE)
def test_a_divergence_is_never_negative(kind: str, outside: str) -> None:
    for drawn in DRAWN.values():
        subject = algorithm("topk_distillation", outside=outside, **KINDS[kind][0])
        assert through_strop(subject, STEPS["random"], candidates=drawn(STEPS["random"])).value >= -1e-12


@KIND
@pytest.mark.parametrize("outside", OUTSIDE)
def test_distributions_without_anything_outside_are_finite(kind: str, outside: str) -> None:
    """The mass on the k tokens is 1 to the last digit, or above by rounding; a student finds a candidate impossible."""
    one = STEPS["random"]
    count = sum(sample.length for sample in one.samples)
    teacher = torch.tensor([[0.0, -800.0, -900.0]]).repeat(count, 1)
    for student in ([0.0, -800.0, -900.0], [-900.0, 0.0, -800.0], [math.log(0.5), math.log(0.5), -700.0], [1e-9, -40.0, -50.0]):
        candidates = Candidates(torch.zeros(count, 3, dtype=torch.int64), teacher, torch.tensor([student]).repeat(count, 1))
        found = through_strop(algorithm("topk_distillation", outside=outside, **KINDS[kind][0]), one, candidates=candidates)
        assert math.isfinite(found.value), student
        assert bool(found.gradients["candidates"].isfinite().all()), student


@pytest.mark.parametrize("outside", OUTSIDE)
def test_jsd_tends_to_forward_and_to_reverse(outside: str) -> None:
    one = STEPS["random"]
    candidates = DRAWN["top 4 of 9"](one)

    def divergence(**options: object) -> Outcome:
        return through_strop(algorithm("topk_distillation", outside=outside, **options), one, candidates=candidates)

    small = 1e-7
    for kind, beta in (("forward", small), ("reverse", 1 - small)):
        exact, limit = divergence(kl_type=kind), divergence(kl_type="jsd", beta=beta)
        assert limit.value / small == pytest.approx(exact.value, rel=1e-5)
        torch.testing.assert_close(limit.gradients["candidates"] / small, exact.gradients["candidates"], rtol=1e-4, atol=1e-7)


def test_the_whole_vocabulary_makes_both_ways_of_treating_the_outside_alike() -> None:
    one = STEPS["random"]
    candidates = Distributions(k=9)(one)
    for options, _ in KINDS.values():
        both = [
            through_strop(algorithm("topk_distillation", outside=outside, **options), one, candidates=candidates).value
            for outside in OUTSIDE
        ]
        assert both[0] == pytest.approx(both[1], rel=1e-6, abs=1e-9)


class Known:
    """A teacher whose log-probabilities are given."""

    def __init__(self, logprobs: Tensor) -> None:
        self.logprobs = logprobs

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        return {"teacher_logprobs": self.logprobs}


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (1e-3, 1.0)], ids=str)
def test_several_teachers_are_a_mixture_of_their_probabilities(weights: tuple[float, float]) -> None:
    """One of them finds some tokens impossible."""
    MixedTeachers = pytest.importorskip("strop.extensions.distillation.teacher").MixedTeachers
    step = STEPS["random"]
    first = column(step, "teacher")
    second = torch.where(torch.arange(len(first)) % 3 == 0, -2000.0, column(step, "reference"))
    batch = packed(step, algorithm("distillation"))
    mixed = asyncio.run(MixedTeachers((Known(first), Known(second)), weights).columns(batch, groups_of(step)))
    shares = [weight / sum(weights) for weight in weights]
    wanted = [formulas.mixture(shares, [one, other]) for one, other in zip(first.tolist(), second.tolist(), strict=True)]
    assert mixed["teacher_logprobs"].tolist() == pytest.approx(wanted, rel=1e-6)
