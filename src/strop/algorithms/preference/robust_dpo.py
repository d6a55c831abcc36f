"""Robust DPO: an unbiased estimate of DPO's loss under labels that are flipped at a known rate (arXiv 2403.00409)."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.preference.referenced import NoisyPreference
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class RobustDPO(NoisyPreference):
    """(-(1 - e) log sigmoid(beta d) + e log sigmoid(-beta d)) / (1 - 2 e), with d = h(chosen) - h(rejected), e = ``label_smoothing``.

    The loss has no lower bound: it decreases linearly for large d.
    """

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        scaled = self.beta * (chosen - rejected)
        loss, flipped_loss = -torch.nn.functional.logsigmoid(scaled), -torch.nn.functional.logsigmoid(-scaled)
        return ((1 - self.label_smoothing) * loss - self.label_smoothing * flipped_loss) / (1 - 2 * self.label_smoothing)
