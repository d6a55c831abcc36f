"""Noise contrastive alignment on pairs (NCA, arXiv 2402.05369)."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.preference.referenced import ReferencedPreference
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class NCAPair(ReferencedPreference):
    """-log sigmoid(r_c) - (log sigmoid(-r_c) + log sigmoid(-r_r)) / 2, with r = beta h of the chosen and the rejected completion.

    It has its minimum at a finite r_c, so the chosen completion does not become less likely, as it may under DPO. The loss is 2 log 2 at
    the reference policy.
    """

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        logsigmoid, chosen, rejected = torch.nn.functional.logsigmoid, self.beta * chosen, self.beta * rejected
        return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)
