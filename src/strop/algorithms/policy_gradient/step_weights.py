"""Correction weights over a whole optimizer step: normalised to a mean of 1, or with rejected tokens taken out of the divisor.

Without either, each micro-batch computes its own weights, and a rejected token counts in every total.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strop import metrics
from strop.algorithms.functional import POLICY_LOGPROBS, sequence_mean
from strop.algorithms.policy_gradient.parts import Advantage, Correction, Mismatch, check_per_token
from strop.algorithms.policy_gradient.rewards import logged_errors
from strop.lazy_torch import Tensor, torch
from strop.metrics import Metrics
from strop.types import Batch

CORRECTION_WEIGHTS = "correction_weights"  # a batch column, [N]: the product of the weights of all corrections
PREFIX = "correction/"  # prefix of logged columns; each holds one number for the whole optimizer step
MIN_MEAN = 1e-8  # lower bound of the normalised weights' mean; below it, they stay unchanged


def correction_weights(corrections: Sequence[Correction], mismatch: Mismatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the product of all correction weights, [N], and columns [N] to log; reuses the result of ``correct_step``."""
    weights, columns = torch.ones_like(mismatch.log_ratio), dict[str, Tensor]()
    if CORRECTION_WEIGHTS in mismatch.batch.columns:
        return mismatch.batch.column(CORRECTION_WEIGHTS), columns
    for correction in corrections:
        own, own_columns = _weigh(correction, mismatch)
        weights, columns = weights * own, {**columns, **own_columns}
    return weights, columns


def _weigh(correction: Correction, mismatch: Mismatch) -> tuple[Tensor, dict[str, Tensor]]:
    return check_per_token(correction, "weights", correction.weights(mismatch), len(mismatch.log_ratio))


def correct_step(
    batch: Batch, mismatch: Mismatch, corrections: Sequence[Correction], *, normalize: bool, rejected_in_divisor: bool
) -> Batch:
    """Return the batch of an optimizer step with the column CORRECTION_WEIGHTS.

    ``normalize`` divides the weights of the correction that reweights by their mean: over tokens, or over rollouts for weights of
    whole rollouts. Without ``rejected_in_divisor``, rejected tokens no longer count, and the batch has new totals. The mean is
    computed first.
    """
    combined, logged = torch.ones_like(mismatch.log_ratio), dict[str, Tensor]()
    rejected = torch.zeros_like(batch.mask, dtype=torch.bool)
    for correction in corrections:
        weights, columns = _weigh(correction, mismatch)
        logged |= {name: _mean(column, batch) for name, column in columns.items()}
        if correction.rejects:
            rejected |= weights == 0
        if normalize and correction.reweights:
            of_rollouts = getattr(correction, "level", "token") == "sequence"
            mean = _mean_over_rollouts(weights, batch) if of_rollouts else _mean(weights, batch)
            logged["correction_mean"] = mean
            weights = weights / mean if mean > MIN_MEAN else weights
        combined = combined * weights
    if not rejected_in_divisor:
        logged["correction_rejected"] = _mean(rejected, batch)
        batch = replace(batch, mask=batch.mask * (~rejected).to(batch.mask.dtype)).with_totals()
    size = len(batch.target)
    constant = {PREFIX + name: value.float().expand(size) for name, value in logged.items()}
    return batch.with_columns({CORRECTION_WEIGHTS: combined, **constant})


def with_credit_weights(batch: Batch, corrections: Sequence[Correction], advantage: Advantage) -> Batch:
    """Return the batch with the weights of reweighting corrections, for an advantage that reads them."""
    reweighting = [correction for correction in corrections if correction.reweights]
    if not (advantage.reads_weights and reweighting):
        return batch
    log_ratio = batch.column(POLICY_LOGPROBS) - batch.rollout_logprobs
    mismatch = Mismatch(log_ratio=log_ratio, advantages=batch.advantages, batch=batch)
    return batch.with_column(CORRECTION_WEIGHTS, correction_weights(reweighting, mismatch)[0])


def logged_steps(batch: Batch) -> Metrics:
    """Return the metrics computed over the whole optimizer step, even if no rollout is left."""
    found = {name: column[0] for name, column in batch.columns.items() if name.startswith(PREFIX) and len(column)}
    own = {name.removeprefix(PREFIX): metrics.mean(value, batch.num_sequences) for name, value in found.items()}
    return {**logged_errors(batch), **own}


def _mean(values: Tensor, batch: Batch) -> Tensor:
    """Return the mean over counted tokens, 0-dimensional float64."""
    counted = values[batch.mask > 0].double()
    return counted.mean() if len(counted) else counted.new_zeros(())


def _mean_over_rollouts(weights: Tensor, batch: Batch) -> Tensor:
    """Return the mean over rollouts of the mean over their counted tokens, 0-dimensional float64."""
    means = sequence_mean(weights.double(), batch)[batch.sequence_lengths > 0]
    return means.mean() if len(means) else means.new_zeros(())
