"""Distillation on the teacher's most likely tokens: each divergence by its formula, what lies outside, and limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.algorithms.base import CANDIDATES, Plan, TokenOutputs
from strop.algorithms.distillation.topk_distillation import TEACHER_CANDIDATES, TopKDistillation, complete_distribution
from strop.types import Batch
from support.rollouts import pack_for, simple_groups

KINDS: list[dict[str, Any]] = [
    {"kl_type": "forward"},
    {"kl_type": "reverse"},
    {"kl_type": "mixed", "mixed_kl_weight": 0.3},
    {"kl_type": "jsd", "beta": 0.2},
]
OUTSIDE = ("bucket", "renormalise")
TOKENS = 6


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def by_formula(p: list[float], q: list[float], kl_type: str, mixed_kl_weight: float = 0.5, beta: float = 0.5) -> float:
    """From whole distributions of teacher p and student q."""
    if kl_type == "forward":
        return kl(p, q)
    if kl_type == "reverse":
        return kl(q, p)
    if kl_type == "mixed":
        return mixed_kl_weight * kl(p, q) + (1 - mixed_kl_weight) * kl(q, p)
    mixture = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


def coarse(probabilities: list[float], outside: str) -> list[float]:
    mass = sum(probabilities)
    return [*probabilities, 1 - mass] if outside == "bucket" else [value / mass for value in probabilities]


def distributions(count: int, vocabulary: int, seed: int) -> tuple[Tensor, Tensor]:
    """Logits of the student, log-probabilities of the teacher, [count, vocabulary] float64."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(2, count, vocabulary, generator=generator, dtype=torch.float64) * 1.5
    return draw[0], draw[1].log_softmax(-1)


def batch_of(teacher: Tensor, ids: Tensor) -> Batch:
    assert len(ids) == TOKENS
    batch = pack_for(simple_groups((3, (4, 2))), TopKDistillation())
    return batch.with_columns({CANDIDATES: ids, TEACHER_CANDIDATES: teacher.gather(1, ids)})


def outputs(logits: Tensor, ids: Tensor) -> TokenOutputs:
    logs = logits.log_softmax(-1)
    return TokenOutputs(logs[:, 0], torch.zeros(len(logs)), logs.gather(1, ids))


def loss_of(logits: Tensor, teacher: Tensor, ids: Tensor, **options: Any) -> float:
    return TopKDistillation(**options).loss(outputs(logits, ids), batch_of(teacher, ids))[0].item()


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("options", KINDS, ids=lambda options: options["kl_type"])
def test_it_is_the_divergence_of_its_formula(options: dict[str, Any], outside: Any) -> None:
    logits, teacher = distributions(TOKENS, 9, 0)
    ids = teacher.topk(4).indices
    batch = batch_of(teacher, ids)
    loss, logged = TopKDistillation(**options, outside=outside).loss(outputs(logits, ids), batch)
    p, q = teacher.gather(1, ids).exp().tolist(), logits.softmax(-1).gather(1, ids).tolist()
    pairs = [(coarse(a, outside), coarse(b, outside)) for a, b in zip(p, q, strict=True)]
    assert float(loss) == pytest.approx(sum(by_formula(a, b, **options) for a, b in pairs) / TOKENS, rel=1e-9)
    assert logged["kl_forward"].value == pytest.approx(sum(kl(a, b) for a, b in pairs) / TOKENS, rel=1e-9)
    assert logged["kl_reverse"].value == pytest.approx(sum(kl(b, a) for a, b in pairs) / TOKENS, rel=1e-9)
    assert logged["teacher_mass"].value == pytest.approx(sum(map(sum, p)) / TOKENS, rel=1e-9)
    assert logged["student_mass"].value == pytest.approx(sum(map(sum, q)) / TOKENS, rel=1e-9)


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("options", KINDS, ids=lambda options: options["kl_type"])
def test_on_the_whole_vocabulary_nothing_is_lost(options: dict[str, Any], outside: Any) -> None:
    """Value and gradient are those of the divergence between the whole distributions."""
    logits, teacher = distributions(TOKENS, 7, 1)
    ids = teacher.topk(7).indices
    found, wanted = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, _ = TopKDistillation(**options, outside=outside).loss(outputs(found, ids), batch_of(teacher, ids))
    loss.backward()
    q = wanted.log_softmax(-1)
    whole = TopKDistillation(**options).divergence(teacher, q).mean()
    whole.backward()
    assert loss.item() == pytest.approx(whole.item(), abs=1e-6)
    assert torch.allclose(found.grad, wanted.grad, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("options", KINDS, ids=lambda options: options["kl_type"])
def test_a_student_that_is_its_teacher_has_no_loss_and_no_gradient(options: dict[str, Any], outside: Any) -> None:
    _, teacher = distributions(TOKENS, 9, 2)
    logits = teacher.clone().requires_grad_()
    ids = teacher.topk(3).indices
    loss, _ = TopKDistillation(**options, outside=outside).loss(outputs(logits, ids), batch_of(teacher, ids))
    loss.backward()
    assert abs(loss.item()) < 1e-12
    assert logits.grad is not None
    assert float(logits.grad.abs().max()) < 1e-12


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), count=st.integers(1, 8), options=st.sampled_from(KINDS))
def test_the_bucket_is_a_lower_bound_that_more_tokens_tighten(seed: int, count: int, options: dict[str, Any]) -> None:
    logits, teacher = distributions(TOKENS, 9, seed)
    algorithm = TopKDistillation(**options)
    found = []
    for k in (count, count + 1, 9):
        ids = teacher.topk(k).indices
        found.append(float(algorithm.loss(outputs(logits, ids), batch_of(teacher, ids))[0]))
    assert -1e-9 <= found[0] <= found[1] + 1e-6 <= found[2] + 2e-6


def test_only_the_bucket_sees_what_the_student_does_outside() -> None:
    """Two students that agree with the teacher on the ratio of its two likeliest tokens; one gives half of its mass to a
    third.
    """
    teacher = torch.tensor([[0.6, 0.3, 0.1]] * TOKENS, dtype=torch.float64).log()
    strays = torch.tensor([[1 / 3, 1 / 6, 1 / 2]] * TOKENS, dtype=torch.float64).log()
    ids = torch.tensor([[0, 1]] * TOKENS)
    losses = {outside: loss_of(strays, teacher, ids, outside=outside) for outside in OUTSIDE}
    assert losses["renormalise"] == pytest.approx(0, abs=1e-12)
    assert losses["bucket"] == pytest.approx(kl([1 / 3, 1 / 6, 1 / 2], [0.6, 0.3, 0.1]))


@pytest.mark.parametrize(("beta", "other"), [(1e-6, "forward"), (1 - 1e-6, "reverse")])
def test_the_jensen_shannon_divergence_tends_to_both_kl_divergences(beta: float, other: Any) -> None:
    logits, teacher = distributions(TOKENS, 9, 3)
    ids = teacher.topk(4).indices
    batch = batch_of(teacher, ids)
    jsd = float(TopKDistillation(kl_type="jsd", beta=beta).loss(outputs(logits, ids), batch)[0])
    limit = float(TopKDistillation(kl_type=other).loss(outputs(logits, ids), batch)[0])
    assert jsd / min(beta, 1 - beta) == pytest.approx(limit, rel=1e-4)


def test_the_jensen_shannon_divergence_at_one_half_is_symmetric_and_at_most_log_two() -> None:
    logits, teacher = distributions(TOKENS, 9, 4)
    student = (20 * logits).log_softmax(-1)
    algorithm = TopKDistillation(kl_type="jsd", beta=0.5)
    there, back = algorithm.divergence(teacher, student), algorithm.divergence(student, teacher)
    assert torch.allclose(there, back)
    assert float(there.max()) <= math.log(2)


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("options", KINDS, ids=lambda options: options["kl_type"])
def test_tokens_that_one_of_them_rules_out_leave_everything_finite(options: dict[str, Any], outside: Any) -> None:
    """A filter gives the student -inf; a peaked teacher has all of its mass on one token; a peaked student too."""
    nothing = float("-inf")
    teacher = torch.tensor([[0.0, nothing, nothing], [-0.1, -3.0, -4.0]] * 3).log_softmax(-1)
    logits = torch.tensor([[nothing, 0.0, 1.0], [200.0, 0.0, nothing]] * 3, requires_grad=True)
    ids = torch.tensor([[0, 1, 2]] * TOKENS)
    loss, logged = TopKDistillation(**options, outside=outside).loss(outputs(logits, ids), batch_of(teacher, ids))
    loss.backward()
    assert math.isfinite(loss.item())
    assert all(math.isfinite(metric.value) for metric in logged.values())
    assert logits.grad is not None
    assert bool(torch.isfinite(logits.grad).all())


def test_a_single_candidate_says_something_only_with_the_bucket() -> None:
    logits, teacher = distributions(TOKENS, 9, 5)
    ids = teacher.topk(1).indices
    found = {outside: loss_of(logits, teacher, ids, outside=outside) for outside in OUTSIDE}
    assert found["renormalise"] == 0.0
    assert found["bucket"] > 0.01


def test_events_are_a_distribution() -> None:
    _, teacher = distributions(5, 9, 6)
    logs = teacher.topk(3).values
    for outside, width in (("bucket", 4), ("renormalise", 3)):
        found = complete_distribution(logs, outside)  # type: ignore[arg-type]
        assert found.shape == (5, width)
        assert torch.allclose(found.exp().sum(-1), torch.ones(5, dtype=torch.float64))


def test_rewards_are_not_learned_from() -> None:
    assert not pack_for(simple_groups((3, (4, 2))), TopKDistillation()).advantages.any()
    assert TopKDistillation().requires == {TEACHER_CANDIDATES}


def test_a_network_that_was_not_asked_for_candidates_is_an_error_that_says_so() -> None:
    logits, teacher = distributions(TOKENS, 9, 7)
    ids = teacher.topk(2).indices
    with pytest.raises(ValueError, match="no column CANDIDATES"):
        TopKDistillation().loss(TokenOutputs(logits[:, 0], logits[:, 0]), batch_of(teacher, ids))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mixed_kl_weight": 1.5}, "mixed_kl_weight is 1.5"),
        ({"kl_type": "jsd", "beta": 0.0}, "beta is 0.0"),
        ({"kl_type": "jsd", "beta": 1.0}, "beta is 1.0"),
        ({"aggregation": "constant_length"}, "constant_length"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    assert any(said in problem for problem in TopKDistillation(**options).validate(Plan()))
    assert list(TopKDistillation().validate(Plan(group_size=1, max_staleness=3))) == []
