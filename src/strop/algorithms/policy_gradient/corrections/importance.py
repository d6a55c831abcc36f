"""Importance weights: the ratio of learner to sampler, of a token or of its whole rollout.

w = pi_o / mu, with mu the probability that the sampler recorded and pi_o that of the learner before the update. All corrections are based
on w. None of them changes the denominator of a loss: a dropped token still counts in every total, so the others do not gain weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from strop.algorithms.functional import MAX_LOG_RATIO, bounded_exp, sequence_mean, sequence_sum
from strop.algorithms.policy_gradient.parts import Correction, Mismatch
from strop.lazy_torch import Tensor, torch

Level = Literal["token", "sequence"]


def log_ratios(mismatch: Mismatch) -> Tensor:
    """Return log w of each token, [N] float64; finite, and 0 for tokens that do not count."""
    counted = mismatch.batch.mask > 0
    ratios = torch.where(counted, mismatch.log_ratio.detach().double(), 0.0)
    return ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def log_weights(mismatch: Mismatch, level: Level) -> Tensor:
    """Return log w of each token, or of the product over its rollout's counted tokens, [N] float64."""
    ratios = log_ratios(mismatch)
    if level == "token":
        return ratios
    return sequence_sum(ratios, mismatch.batch)[mismatch.batch.sequence]


def geometric_mean_weights(mismatch: Mismatch) -> Tensor:
    """Return exp(mean log w) over the counted tokens of each token's rollout, [N] float64; 1 if no token of the rollout counts."""
    return bounded_exp(sequence_mean(log_ratios(mismatch), mismatch.batch))[mismatch.batch.sequence]


def check_ratio_range(low: float, high: float, what: str) -> None:
    """Check the bounds of a ratio. Raises ValueError if no ratio can lie in [low, high]."""
    if not 0 <= low <= high or high == 0:
        raise ValueError(
            f"{what} is kept in [{low}, {high}], which contains no ratio of probabilities; set 0 <= low <= high and high above 0, "
            "around 1, the ratio at which sampler and learner agree"
        )


@dataclass(frozen=True, kw_only=True)
class Importance(Correction):
    """w without bounds: unbiased, but with unbounded variance.

    With ``level`` sequence, each token gets the product over its rollout. Logs ``importance_weight``.
    """

    rejects: ClassVar[bool] = False
    level: Level = "token"

    def weights(self, mismatch: Mismatch) -> tuple[Tensor, dict[str, Tensor]]:
        weights = bounded_exp(log_weights(mismatch, self.level)).to(mismatch.log_ratio.dtype)
        return weights, {"importance_weight": weights}
