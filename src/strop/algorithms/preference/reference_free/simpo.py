"""Simple Preference Optimization (arXiv 2405.14734): the reward is the mean log-probability, without a reference."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.preference.base import smoothed_logistic
from strop.algorithms.preference.reference_free.reference_free import ReferenceFreePreference
from strop.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SimPO(ReferenceFreePreference):
    """-log sigmoid(beta (h(chosen) - h(rejected)) - gamma), with h the mean log pi of a completion's tokens.

    ``gamma`` is the margin of the scaled rewards, as in the paper. TRL's CPOTrainer has the same option (simpo_gamma), but its default
    beta is 0.1, while the paper uses 2 to 2.5. ``alphapo`` shapes h with ``alpha``.
    """

    beta: float = 2.0
    gamma: float = 1.0
    average_log_probs: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma < 0:
            raise ValueError(f"gamma is {self.gamma}: the margin between chosen and rejected completion must not be negative")

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return smoothed_logistic(self.beta * (chosen - rejected) - self.gamma, self.label_smoothing)
