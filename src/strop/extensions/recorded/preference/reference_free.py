"""Pair losses without a reference policy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from strop.algorithms.base import TokenOutputs
from strop.algorithms.functional import MAX_EXPONENT
from strop.extensions.recorded.preference.base import (
    PairwisePreference,
    check_label_smoothing,
    require_positive,
    smoothed_logistic,
)
from strop.lazy_torch import Tensor, torch
from strop.types import Batch


@dataclass(frozen=True, kw_only=True)
class ReferenceFreePreference(PairwisePreference):
    """Base class of pair losses on log pi without a reference. ``beta`` is the scale of the reward.

    ``alpha`` shapes the reward as in AlphaPO (arXiv 2501.03884): h = (1 - p^-alpha) / alpha with p = exp(log pi), which is log pi itself
    for 0. ``label_smoothing`` is the share of pairs whose label is wrong, as in cDPO.
    """

    beta: float
    alpha: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("beta", self.beta)
        check_label_smoothing(self.label_smoothing)

    @property
    def reward_scale(self) -> float:
        return self.beta

    def scores(self, outputs: TokenOutputs, batch: Batch) -> Tensor:
        logprobs = super().scores(outputs, batch)
        return logprobs if not self.alpha else -torch.expm1((-self.alpha * logprobs).clamp(max=MAX_EXPONENT)) / self.alpha


@dataclass(frozen=True, kw_only=True)
class SimPO(ReferenceFreePreference):
    """Simple Preference Optimization (arXiv 2405.14734): the reward is the mean log-probability, without a reference.

    -log sigmoid(beta (h(chosen) - h(rejected)) - gamma), with h the mean log pi of a completion's tokens.

    ``gamma`` is the margin of the scaled rewards, as in the paper. TRL's CPOTrainer has the same option (simpo_gamma), but its default
    beta is 0.1, while the paper uses 2 to 2.5. ``alphapo`` shapes h with ``alpha``.
    """

    name: ClassVar[str] = "simpo"

    beta: float = 2.0
    gamma: float = 1.0
    average_log_probs: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma < 0:
            raise ValueError(f"gamma is {self.gamma}: the margin between chosen and rejected completion must not be negative")

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return smoothed_logistic(self.beta * (chosen - rejected) - self.gamma, self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class AlphaPO(SimPO):
    """AlphaPO (arXiv 2501.03884): SimPO with a reward of another shape.

    SimPO with h = (1 - p^-alpha) / alpha, p the geometric mean of a completion's token probabilities.

    ``alpha`` above 0 has a steeper reward for unlikely completions and a flatter one for likely ones, so that those stop being pushed
    earlier; below 0 it is the other way round, and 0 is SimPO.
    """

    name: ClassVar[str] = "alphapo"

    alpha: float = 0.25


@dataclass(frozen=True, kw_only=True)
class CPO(ReferenceFreePreference):
    """Contrastive Preference Optimization (CPO, arXiv 2401.08417): a pair loss without a reference, plus the likelihood of the chosen
    completion.

    L(beta (h(chosen) - h(rejected))) - log pi(chosen), with h = log pi of a completion.

    ``loss_type`` sigmoid: -log sigmoid, DPO with a uniform reference (the paper, equation 3); hinge: max(0, 1 - .); ipo:
    (h(chosen) - h(rejected) - 1 / (2 beta))^2. ``sft_weight`` is TRL's cpo_alpha, and its mean is over all chosen tokens. TRL's ipo
    averages h over tokens: set ``average_log_probs`` for it.
    """

    beta: float = 0.1
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    sft_weight: float = 1.0
    sft_aggregation: Literal["sequence_sum", "sequence_mean", "token_mean"] = "token_mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise ValueError(
                f"label_smoothing applies to loss_type sigmoid, but loss_type is {self.loss_type}; set label_smoothing to 0"
            )

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        gap = chosen - rejected
        match self.loss_type:
            case "sigmoid":
                return smoothed_logistic(self.beta * gap, self.label_smoothing)
            case "hinge":
                return (1 - self.beta * gap).relu()
            case "ipo":
                return (gap - 1 / (2 * self.beta)).square()


MAX_LOGPROB = -1e-9  # upper bound of a mean log-probability, because the odds of probability 1 are infinite


@dataclass(frozen=True, kw_only=True)
class ORPO(PairwisePreference):
    """Odds Ratio Preference Optimization (arXiv 2403.07691): SFT on the chosen completion and an odds ratio, without a reference.

    -mean log pi(chosen) - preference_weight x log sigmoid(log odds(chosen) - log odds(rejected)), odds = p / (1 - p).

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
