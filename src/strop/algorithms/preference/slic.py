"""The hinge loss of SLiC-HF (arXiv 2305.10425) on DPO's implicit reward, as normalized by RSO (2309.06657); TRL's "hinge"."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.preference.referenced import ComparedPreference
from strop.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SLiC(ComparedPreference):
    """max(0, 1 - beta (h(chosen) - h(rejected))). A pair with a gap of at least 1 / beta has no gradient.

    The original SLiC-HF has no reference and adds an SFT term (``sft_weight``).
    """

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (1 - self.beta * (chosen - rejected)).relu()
