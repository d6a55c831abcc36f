"""Binary classifier optimization on pairs (BCO, arXiv 2404.04656), without its shift of the reward."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.preference.referenced import ReferencedPreference
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class BCOPair(ReferencedPreference):
    """-log sigmoid(r_c) - log sigmoid(-r_r), with r = beta h: a classifier of chosen against rejected completions, which bounds DPO's loss.

    The loss is 2 log 2 at the reference policy.
    """

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        logsigmoid = torch.nn.functional.logsigmoid
        return -logsigmoid(self.beta * chosen) - logsigmoid(-self.beta * rejected)
