"""Masked importance sampling: the ratio of learner to sampler within bounds, and 0 outside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.functional import bounded_exp
from strop.algorithms.policy_gradient.corrections.importance import Level, check_ratio_range, log_weights
from strop.algorithms.policy_gradient.parts import Correction, Mismatch
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class Mis(Correction):
    """w if low <= w <= high, else 0 (Liu, Li et al., "When speed kills stability", 2025).

    With ``level`` sequence, w is the product over the rollout, which is kept or dropped as a whole. Dropped tokens still count in the
    denominators of the loss. Logs ``mis_weight``, and ``mis_cut``, the share of dropped tokens.
    """

    name: ClassVar[str] = "mis"
    low: float = 0.0
    high: float = 2.0
    level: Level = "token"

    def __post_init__(self) -> None:
        check_ratio_range(self.low, self.high, "w")

    def weights(self, mismatch: Mismatch) -> tuple[Tensor, dict[str, Tensor]]:
        ratios = bounded_exp(log_weights(mismatch, self.level))
        dtype = mismatch.log_ratio.dtype
        kept = (ratios >= self.low) & (ratios <= self.high)
        weights = torch.where(kept, ratios, 0.0).to(dtype)
        return weights, {f"{self.name}_weight": weights, f"{self.name}_cut": (~kept).to(dtype)}


@dataclass(frozen=True, kw_only=True)
class Icepop(Mis):
    """Mis of tokens with the wide band of IcePop (Ling team, "Small leak can sink a great ship", 2025).

    Logs ``icepop_weight`` and ``icepop_cut``.
    """

    name: ClassVar[str] = "icepop"
    low: float = 0.5
    high: float = 5.0
