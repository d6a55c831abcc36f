"""Anchored Preference Optimization, down (arXiv 2408.06266, equation 8): for data worse than what the policy writes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from strop.algorithms.preference import ReferencedPreference


@dataclass(frozen=True, kw_only=True)
class APODown(ReferencedPreference):
    """sigmoid(beta h(chosen)) + 1 - sigmoid(beta (h(chosen) - h(rejected))): both become less likely, the rejected one more so.

    At the reference it is 1, and has no slope in h(chosen) yet: that begins once the two are apart.
    """

    def compare(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (self.beta * chosen).sigmoid() + (-self.beta * (chosen - rejected)).sigmoid()
