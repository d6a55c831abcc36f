"""Anchored Preference Optimization, down (arXiv 2408.06266, equation 8): for data worse than the policy's own samples."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.preference.referenced import ReferencedPreference
from strop.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class APODown(ReferencedPreference):
    """sigmoid(beta h(chosen)) + 1 - sigmoid(beta (h(chosen) - h(rejected))).

    Both completions become less likely, the rejected one more so. The loss is 1 at the reference policy, where its gradient in h(chosen)
    is 0.
    """

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (self.beta * chosen).sigmoid() + (-self.beta * (chosen - rejected)).sigmoid()
