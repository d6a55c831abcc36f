"""Truncated importance sampling (Ionides, 2008): the ratio of learner to sampler, clamped to bound its variance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.functional import bounded_exp
from strop.algorithms.policy_gradient.corrections.importance import Level, log_weights
from strop.algorithms.policy_gradient.parts import Correction, Mismatch
from strop.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Tis(Correction):
    """max(floor, min(w, cap)), w per token (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025).

    With ``level`` sequence, w of each token is the product over its rollout. Logs ``tis_weight``, and ``tis_cut``, the share of tokens
    with w outside the bounds.
    """

    rejects: ClassVar[bool] = False
    cap: float = 2.0
    floor: float = 0.0
    level: Level = "token"

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= self.cap or self.cap == 0:
            raise ValueError(
                f"w is clamped to [{self.floor}, {self.cap}]: the floor must not be negative or above the cap, and the cap must be "
                "above 0; set for example cap 2.0 and floor 0"
            )

    def weights(self, mismatch: Mismatch) -> tuple[Tensor, dict[str, Tensor]]:
        ratios = bounded_exp(log_weights(mismatch, self.level))
        dtype = mismatch.log_ratio.dtype
        weights = ratios.clamp(self.floor, self.cap).to(dtype)
        return weights, {"tis_weight": weights, "tis_cut": ((ratios < self.floor) | (ratios > self.cap)).to(dtype)}
