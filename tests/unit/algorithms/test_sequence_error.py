"""``seq_logprob_error_threshold``: rollouts on which sampler and learner disagree leave the loss and its denominators."""

from __future__ import annotations

import math

import pytest
import torch

from strop.algorithms.base import Plan, TokenOutputs
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.grpo import GRPO
from strop.algorithms.policy_gradient.rewards import mask_sequence_errors
from support.mismatch import log_ratios, make_mismatch


def test_a_rollout_is_masked_by_the_mean_factor_between_the_two_probabilities_in_either_direction() -> None:
    """Means: (4 + 4) / 2, though the geometric mean of the ratios is 1; 1.2; 1."""
    mismatch = make_mismatch(log_ratios(4.0, 0.25), log_ratios(1.2, 1.2), log_ratios(1.0))
    batch = mismatch.batch
    found = mask_sequence_errors(batch, batch.rollout_logprobs + mismatch.log_ratio, 2.0)
    assert found.mask.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert (found.totals.tokens, found.totals.sequences) == (3, 2)
    assert float(found.column("sequence_error/masked")[0]) == pytest.approx(1 / 3)
    assert float(found.column("sequence_error/mean")[0]) == pytest.approx((4 + 1.2 + 1) / 3, rel=1e-5)
    assert float(found.column("sequence_error/max")[0]) == pytest.approx(4.0, rel=1e-5)


def test_what_was_left_out_before_is_not_measured() -> None:
    mismatch = make_mismatch(log_ratios(9.0), log_ratios(1.1), kept=[False, True])
    found = mask_sequence_errors(mismatch.batch, mismatch.batch.rollout_logprobs + mismatch.log_ratio, 2.0)
    assert found.mask.tolist() == [0.0, 1.0] and float(found.column("sequence_error/masked")[0]) == 0.0
    assert float(found.column("sequence_error/max")[0]) == pytest.approx(1.1, rel=1e-5)


def test_a_token_that_the_sampler_held_for_impossible_masks_its_rollout_without_a_nan() -> None:
    mismatch = make_mismatch([math.inf], [0.0])
    found = mask_sequence_errors(mismatch.batch, mismatch.batch.rollout_logprobs + mismatch.log_ratio, 2.0)
    assert found.mask.tolist() == [0.0, 1.0] and all(bool(torch.isfinite(column).all()) for column in found.columns.values())


def test_the_loss_and_its_kl_term_are_those_of_the_rollouts_that_are_left() -> None:
    """As if the masked one had never been sampled: it counts in no mean, and its tokens have no gradient."""
    mismatch = make_mismatch(log_ratios(5.0, 5.0), log_ratios(1.1), log_ratios(0.9, 1.0), credit=[1.0, -1.0, 2.0])
    batch = mismatch.batch.with_column("reference_logprobs", mismatch.batch.rollout_logprobs - 0.3)
    algorithm = GRPO(seq_logprob_error_threshold=2.0, kl=Kl(weight=0.1))
    logprobs = (batch.rollout_logprobs + mismatch.log_ratio).requires_grad_()
    assert algorithm.needs_step_outputs
    prepared = algorithm.prepare_step(batch, TokenOutputs(logprobs.detach(), torch.zeros_like(logprobs)))
    loss, logged = algorithm.loss(TokenOutputs(logprobs, torch.zeros_like(logprobs)), prepared)
    loss.backward()
    assert logprobs.grad is not None and logprobs.grad[:2].tolist() == [0.0, 0.0] and bool(logprobs.grad[2:].abs().min() > 0)
    advantages, kl = batch.advantages[2:], Kl(weight=0.1).estimate(logprobs.detach(), batch)[2:]
    assert loss.item() == pytest.approx(float((-advantages + 0.1 * kl).sum() / 3), rel=1e-5)
    assert logged["sequence_error_masked"].value == pytest.approx(1 / 3) and logged["sequence_error_max"].value == pytest.approx(
        5.0
    )


def test_a_step_that_has_no_rollout_left_has_no_loss_and_says_so() -> None:
    mismatch = make_mismatch(log_ratios(5.0, 5.0), log_ratios(4.0))
    outputs = TokenOutputs(mismatch.batch.rollout_logprobs + mismatch.log_ratio, torch.zeros(3))
    algorithm = GRPO(seq_logprob_error_threshold=2.0)
    loss, logged = algorithm.loss(outputs, algorithm.prepare_step(mismatch.batch, outputs))
    assert float(loss) == 0.0
    assert (logged["sequence_error_masked"].value, logged["sequence_error_mean"].value) == pytest.approx((1.0, 4.5), rel=1e-5)


def test_with_several_optimizer_steps_the_learner_before_all_of_them_is_compared() -> None:
    mismatch = make_mismatch(log_ratios(5.0), log_ratios(1.0))
    batch = mismatch.batch.with_column("policy_logprobs", mismatch.batch.rollout_logprobs)
    moved = TokenOutputs(batch.rollout_logprobs + mismatch.log_ratio, torch.zeros(2))
    prepared = GRPO(seq_logprob_error_threshold=2.0).prepare_step(batch, moved)
    assert prepared.mask.tolist() == [1.0, 1.0]


def test_a_threshold_that_nothing_passes_is_refused() -> None:
    (said,) = GRPO(seq_logprob_error_threshold=0.5).validate(Plan(group_size=4))
    assert "seq_logprob_error_threshold is 0.5" in said and "set it above 1" in said
