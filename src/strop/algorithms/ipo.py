"""Identity Preference Optimization (arXiv 2310.12036, equation 17)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from strop.algorithms.preference import ReferencedPreference


@dataclass(frozen=True, kw_only=True)
class IPO(ReferencedPreference):
    """(h(chosen) - h(rejected) - 1 / (2 beta))^2, with beta the paper's tau: the gap is pulled to a finite width.

    The paper writes h as a sum over tokens; its authors averaged over them in what they ran, as TRL does, and as is the default here.
    ``average_log_probs`` false is the formula as printed.
    """

    average_log_probs: bool = True

    def compare(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (chosen - rejected - 1 / (2 * self.beta)).square()
