"""Distillation: what it requires and reports, on sampled tokens and on the teacher's most likely ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.algorithms.base import CANDIDATES, Plan, TokenOutputs
from strop.algorithms.functional import POLICY_LOGPROBS
from strop.algorithms.kl import REFERENCE_LOGPROBS, Kl
from strop.algorithms.policy_gradient.grpo import GroupRelative
from strop.extensions.distillation.distillation import (
    TEACHER_CANDIDATES,
    TEACHER_LOGPROBS,
    Distillation,
    ReverseKl,
    TopKDistillation,
)
from strop.types import Batch
from support.rollouts import pack_for, simple_groups


def batch_of(algorithm: Distillation, *, seed: int = 0) -> Batch:
    """With a teacher's column, before credit."""
    batch = pack_for(simple_groups((3, (4, 2)), (2, (5,))), algorithm)
    noise = torch.randn(len(batch.target), generator=torch.Generator().manual_seed(seed))
    return batch.with_column(TEACHER_LOGPROBS, batch.rollout_logprobs + noise)


def test_without_a_weight_rewards_make_no_difference_and_a_group_may_be_a_single_rollout() -> None:
    assert list(Distillation().validate(Plan(group_size=1))) == []
    assert not pack_for(simple_groups((3, (4, 2))), Distillation()).advantages.any()
    mixed = Distillation(advantage=ReverseKl(reward_weight=1.0, reward=GroupRelative()))
    assert any("the group size is 1" in problem for problem in mixed.validate(Plan(group_size=1)))
    assert list(mixed.validate(Plan(group_size=4))) == []


def test_it_requires_a_teacher_and_the_policy_before_the_update_and_a_reference_only_for_a_kl_term() -> None:
    assert Distillation().requires == {TEACHER_LOGPROBS, POLICY_LOGPROBS}
    assert Distillation(kl=Kl(weight=0.1)).requires == {TEACHER_LOGPROBS, POLICY_LOGPROBS, REFERENCE_LOGPROBS}


def test_it_reports_how_far_the_policy_is_from_its_teacher_on_counted_tokens() -> None:
    batch = batch_of(Distillation())
    batch = replace(batch, mask=(batch.sequence != 2).float())
    apart = (batch.rollout_logprobs - batch.column(TEACHER_LOGPROBS))[batch.sequence != 2]
    assert Distillation().report(batch)["train/teacher_kl"] == pytest.approx(float(apart.mean()))
    assert Distillation().report(replace(batch, mask=torch.zeros(11))) == {}


KINDS: list[dict[str, Any]] = [
    {"kl_type": "forward"},
    {"kl_type": "reverse"},
    {"kl_type": "mixed", "mixed_kl_weight": 0.3},
    {"kl_type": "jsd", "beta": 0.2},
]

OUTSIDE = ("bucket", "renormalise")
TOKENS = 6


def distributions(count: int, vocabulary: int, seed: int) -> tuple[Tensor, Tensor]:
    """Logits of the student, log-probabilities of the teacher, [count, vocabulary] float64."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(2, count, vocabulary, generator=generator, dtype=torch.float64) * 1.5
    return draw[0], draw[1].log_softmax(-1)


def with_candidates(teacher: Tensor, ids: Tensor) -> Batch:
    assert len(ids) == TOKENS
    batch = pack_for(simple_groups((3, (4, 2))), TopKDistillation())
    return batch.with_columns({CANDIDATES: ids, TEACHER_CANDIDATES: teacher.gather(1, ids)})


def outputs(logits: Tensor, ids: Tensor) -> TokenOutputs:
    logs = logits.log_softmax(-1)
    return TokenOutputs(logs[:, 0], torch.zeros(len(logs)), logs.gather(1, ids))


@pytest.mark.parametrize("outside", OUTSIDE)
def test_both_divergences_and_the_mass_of_the_candidates_are_logged(outside: Any) -> None:
    logits, teacher = distributions(TOKENS, 9, 0)
    ids = teacher.topk(4).indices
    batch = with_candidates(teacher, ids)
    losses = {
        kind: TopKDistillation(kl_type=kind, outside=outside).loss(outputs(logits, ids), batch) for kind in ("forward", "reverse")
    }
    logged = {name: metric.value for name, metric in losses["reverse"][1].items()}
    assert (logged["kl_forward"], logged["kl_reverse"]) == pytest.approx([float(loss) for loss, _ in losses.values()], rel=1e-9)
    assert logged["teacher_mass"] == pytest.approx(float(teacher.gather(1, ids).exp().sum(1).mean()), rel=1e-9)
    assert logged["student_mass"] == pytest.approx(float(logits.softmax(-1).gather(1, ids).sum(1).mean()), rel=1e-9)


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("options", KINDS, ids=lambda options: options["kl_type"])
def test_tokens_that_one_of_them_rules_out_leave_everything_finite(options: dict[str, Any], outside: Any) -> None:
    """A filter gives the student -inf; a peaked teacher has all of its mass on one token; a peaked student too."""
    nothing = float("-inf")
    teacher = torch.tensor([[0.0, nothing, nothing], [-0.1, -3.0, -4.0]] * 3).log_softmax(-1)
    logits = torch.tensor([[nothing, 0.0, 1.0], [200.0, 0.0, nothing]] * 3, requires_grad=True)
    ids = torch.tensor([[0, 1, 2]] * TOKENS)
    loss, logged = TopKDistillation(**options, outside=outside).loss(outputs(logits, ids), with_candidates(teacher, ids))
    loss.backward()
    assert math.isfinite(loss.item())
    assert all(math.isfinite(metric.value) for metric in logged.values())
    assert logits.grad is not None
    assert bool(torch.isfinite(logits.grad).all())


def test_rewards_are_not_learned_from() -> None:
    assert not pack_for(simple_groups((3, (4, 2))), TopKDistillation()).advantages.any()
    assert TopKDistillation().requires == {TEACHER_CANDIDATES}


def test_a_network_that_was_not_asked_for_candidates_is_an_error_that_says_so() -> None:
    logits, teacher = distributions(TOKENS, 9, 7)
    ids = teacher.topk(2).indices
    with pytest.raises(ValueError, match="no column CANDIDATES"):
        TopKDistillation().loss(TokenOutputs(logits[:, 0], logits[:, 0]), with_candidates(teacher, ids))
