"""Rollouts on which sampler and learner disagree leave the loss (NeMo-RL's ``seq_logprob_error_threshold``).

The error of a rollout is the mean of exp|log pi_o - log mu| over its counted tokens: 1 where the two agree, and the same measure
as ``train/token_mult_prob_error``. The sign of a difference does not matter, unlike in ``sequence_mask_tis`` and the rejections,
and an excluded rollout also does not count in the denominators of the loss or in its KL term.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from strop import metrics
from strop.algorithms.functional import bounded_exp, sequence_mean
from strop.lazy_torch import Tensor, torch
from strop.metrics import Metrics
from strop.types import Batch

PREFIX = "sequence_error/"  # prefix of logged columns; each holds one number for the whole optimizer step


def mask_sequence_errors(batch: Batch, learner_logprobs: Tensor, threshold: float) -> Batch:
    """Return the batch of an optimizer step without the rollouts whose error is above ``threshold``, with new totals.

    ``learner_logprobs`` [N] are those of the learner before the update.
    """
    difference = torch.where(batch.mask > 0, (learner_logprobs.detach() - batch.rollout_logprobs).double(), 0.0)
    errors = sequence_mean(bounded_exp(difference.abs()), batch)
    counted = batch.sequence_lengths > 0
    kept = ~(errors > threshold)
    masked = counted & ~kept
    columns = {
        "masked": masked.sum() / counted.sum().clamp(min=1),
        "masked_rewarded": (batch.rewards[masked] > 0).double().sum() / masked.sum().clamp(min=1),
        "mean": errors[counted].mean() if counted.any() else torch.zeros(()),
        "max": errors[counted].max() if counted.any() else torch.zeros(()),
    }
    batch = replace(batch, mask=batch.mask * kept[batch.sequence].to(batch.mask.dtype)).with_totals()
    return batch.with_columns({PREFIX + name: value.float().expand(len(batch.target)) for name, value in columns.items()})


def check_threshold(threshold: float | None) -> Iterator[str]:
    """Yield why no rollout can have an error of at most ``threshold``."""
    if threshold is not None and threshold < 1:
        yield (
            f"seq_logprob_error_threshold is {threshold}, but the error is 1 where sampler and learner agree, so no rollout would be left; "
            "set it above 1, for instance to 2, or to null"
        )


def logged_errors(batch: Batch) -> Metrics:
    """Return the metrics of ``mask_sequence_errors``, even if no rollout is left."""
    found = {name: column[0] for name, column in batch.columns.items() if name.startswith(PREFIX) and len(column)}
    return {
        name.replace("/", "_"): metrics.maximum(value) if name == f"{PREFIX}max" else metrics.mean(value, batch.num_sequences)
        for name, value in found.items()
    }
