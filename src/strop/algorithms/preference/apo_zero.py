"""Anchored Preference Optimization, zero (arXiv 2408.06266, equation 7): for data better than the policy's own samples."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.preference.referenced import ReferencedPreference
from strop.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class APOZero(ReferencedPreference):
    """1 - sigmoid(beta h(chosen)) + sigmoid(beta h(rejected)): the chosen completion becomes more likely, the rejected one less.

    The loss is 1 at the reference policy.
    """

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (-self.beta * chosen).sigmoid() + (self.beta * rejected).sigmoid()
