"""Efficient exact optimization on pairs (EXO, arXiv 2402.00856, equation 16)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from strop.algorithms.preference.referenced import NoisyPreference
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class EXOPair(NoisyPreference):
    """KL(p || q) over the two completions, with p(chosen) = sigmoid(beta d), q(chosen) = 1 - e and e = ``label_smoothing``.

    d = h(chosen) - h(rejected). DPO minimizes the opposite direction, KL(q || p). e must be above 0, because q(rejected) = 0 makes the
    divergence infinite; the paper recommends 0.001.
    """

    label_smoothing: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.label_smoothing:
            raise ValueError(
                "label_smoothing is 0, which makes the divergence of EXO infinite; set it above 0, for example to 0.001"
            )

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        margin = self.beta * (chosen - rejected)
        log_p = torch.nn.functional.logsigmoid(torch.stack([margin, -margin], -1))
        log_q = log_p.new_tensor([math.log1p(-self.label_smoothing), math.log(self.label_smoothing)])
        return (log_p.exp() * (log_p - log_q)).sum(-1)
