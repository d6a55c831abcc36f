"""Identity Preference Optimization (arXiv 2310.12036, equation 17)."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.preference.referenced import ComparedPreference
from strop.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class IPO(ComparedPreference):
    """(h(chosen) - h(rejected) - 1 / (2 beta))^2, with beta the paper's tau: the gap has a finite target.

    In the paper h is a sum over tokens. Its authors averaged over tokens in their experiments, as do TRL and the default here;
    ``average_log_probs`` false is the formula of the paper.
    """

    average_log_probs: bool = True

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (chosen - rejected - 1 / (2 * self.beta)).square()
