"""Self-play preference optimization (SPPO, arXiv 2405.00675, equation 4.7) with hard labels."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.preference.referenced import ReferencedPreference
from strop.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SPPOHard(ReferencedPreference):
    """(h(chosen) - 1 / (2 beta))^2 + (h(rejected) + 1 / (2 beta))^2: the win rates of the paper are 1 and 0.

    Each log-ratio has its own target, so both completions of a pair move. 1 / beta is the paper's eta.
    """

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        target = 1 / (2 * self.beta)
        return (chosen - target).square() + (rejected + target).square()
