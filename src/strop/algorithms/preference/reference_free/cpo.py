"""Contrastive Preference Optimization (CPO, arXiv 2401.08417): a pair loss without a reference, plus the likelihood of the chosen
completion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strop.algorithms.preference.base import smoothed_logistic
from strop.algorithms.preference.reference_free.reference_free import ReferenceFreePreference
from strop.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CPO(ReferenceFreePreference):
    """L(beta (h(chosen) - h(rejected))) - log pi(chosen), with h = log pi of a completion.

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
