"""The ratio of learner to sampler, of a token or of its whole rollout: the weight that importance sampling asks for.

With mu what the sampler recorded and pi_o the learner before the update, w = pi_o / mu. Every correction begins here. None of them changes
what a loss is divided by: a token that was dropped still counts in every total, so that dropping never makes the others weigh more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from strop.algorithms.functional import exponential, sequence_mean, sequence_sum
from strop.algorithms.parts import Correction, Mismatch

Level = Literal["token", "sequence"]

LARGEST_LOG_RATIO = 1e4  # nats: stands for infinity, where one side gave a sampled token probability 0


def log_ratios(mismatch: Mismatch) -> Tensor:
    """log w of each token, [N] float64: finite, and 0 for tokens that do not count."""
    counted = mismatch.batch.mask > 0
    ratios = torch.where(counted, mismatch.log_ratio.detach().double(), 0.0)
    return ratios.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def log_weights(mismatch: Mismatch, level: Level) -> Tensor:
    """log w of each token, or of the product over its rollout's counted tokens, [N] float64."""
    ratios = log_ratios(mismatch)
    if level == "token":
        return ratios
    return sequence_sum(ratios, mismatch.batch)[mismatch.batch.sequence]


def mean_weights(mismatch: Mismatch) -> Tensor:
    """exp(mean log w) over the counted tokens of each token's rollout, [N] float64: the same for all of them, 1 where none counts."""
    return exponential(sequence_mean(log_ratios(mismatch), mismatch.batch))[mismatch.batch.sequence]


def refuse_empty_range(low: float, high: float, what: str) -> None:
    """Raises ValueError where no ratio lies in [low, high]."""
    if not 0 <= low <= high or high == 0:
        raise ValueError(
            f"{what} is kept in [{low}, {high}], where no ratio of probabilities can lie; set 0 <= low <= high and high above 0, "
            "around 1, which is where sampler and learner agree"
        )


@dataclass(frozen=True, kw_only=True)
class Importance(Correction):
    """w, without a bound: unbiased, and of unbounded variance.

    ``level`` sequence: the product over the rollout, for each of its tokens. Logged: ``importance_weight``.
    """

    level: Level = "token"

    def weights(self, mismatch: Mismatch) -> tuple[Tensor, dict[str, Tensor]]:
        weights = exponential(log_weights(mismatch, self.level)).to(mismatch.log_ratio.dtype)
        return weights, {"importance_weight": weights}
