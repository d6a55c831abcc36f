"""Anchored Preference Optimization, zero (arXiv 2408.06266, equation 7): for data better than what the policy writes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from strop.algorithms.preference import ReferencedPreference


@dataclass(frozen=True, kw_only=True)
class APOZero(ReferencedPreference):
    """1 - sigmoid(beta h(chosen)) + sigmoid(beta h(rejected)): the chosen completion becomes likelier, the rejected one less likely.

    At the reference it is 1.
    """

    def compare(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (-self.beta * chosen).sigmoid() + (self.beta * rejected).sigmoid()
