"""Distillation by a per-token advantage: what a token earns, how rewards are mixed in, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strop.algorithms.base import Plan
from strop.algorithms.distillation.distillation import TEACHER_LOGPROBS, Distillation, ReverseKl
from strop.algorithms.functional import POLICY_LOGPROBS
from strop.algorithms.kl import REFERENCE_LOGPROBS, Kl
from strop.algorithms.policy_gradient.advantages.grpo import GroupRelative
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
