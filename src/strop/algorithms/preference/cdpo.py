"""Conservative DPO (Mitchell, A note on DPO with noisy preferences, 2023): DPO, arXiv 2305.18290, with smoothed labels."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.preference.base import smoothed_logistic
from strop.algorithms.preference.referenced import NoisyPreference
from strop.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CDPO(NoisyPreference):
    """-(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d), with d = h(chosen) - h(rejected) and e = ``label_smoothing``.

    Its minimum is at a finite margin, beta d = log((1 - e) / e). ``robust_dpo`` corrects the bias of label smoothing.
    """

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return smoothed_logistic(self.beta * (chosen - rejected), self.label_smoothing)
