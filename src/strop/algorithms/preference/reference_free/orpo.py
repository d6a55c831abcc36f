"""Odds Ratio Preference Optimization (arXiv 2403.07691): SFT on the chosen completion and an odds ratio, without a reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

from strop.algorithms.preference.base import PairwisePreference
from strop.lazy_torch import Tensor, torch

MAX_LOGPROB = -1e-9  # upper bound of a mean log-probability, because the odds of probability 1 are infinite


@dataclass(frozen=True, kw_only=True)
class ORPO(PairwisePreference):
    """-mean log pi(chosen) - preference_weight x log sigmoid(log odds(chosen) - log odds(rejected)), odds = p / (1 - p).

    p is the geometric mean of a completion's token probabilities. ``preference_weight`` is the paper's lambda (TRL's beta); the
    logged rewards are log p. TRL and the authors' code include the prompt in the SFT term; here it is over the loss tokens, as in the
    paper.
    """

    preference_weight: float = 0.1
    sft_weight: float = 1.0
    average_log_probs: bool = True

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -torch.nn.functional.logsigmoid(log_odds(chosen) - log_odds(rejected))


def log_odds(logprob: Tensor) -> Tensor:
    """Return log(p / (1 - p)) from log p <= 0, accurate for p near 0 and near 1."""
    bounded = logprob.clamp(max=MAX_LOGPROB)
    # Each branch gets only inputs for which it is accurate, because the gradient of the unused branch would otherwise be NaN.
    likely = bounded > -math.log(2)
    near_one = torch.where(likely, bounded, -1.0)
    near_zero = torch.where(likely, -1.0, bounded)
    return bounded - torch.where(likely, (-torch.expm1(near_one)).log(), torch.log1p(-near_zero.exp()))
