"""Rejection of rollouts combined with importance sampling of the tokens of kept rollouts."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.functional import bounded_exp
from strop.algorithms.policy_gradient.corrections.importance import check_ratio_range, geometric_mean_weights, log_ratios
from strop.algorithms.policy_gradient.parts import Correction, Mismatch
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class SequenceMaskTis(Correction):
    """w per token, at most ``cap`` if set, in rollouts with low <= exp(mean log w) <= high; 0 in the others.

    From "When speed kills stability" (2025), with its bounds as default. Dropped tokens still count in the denominators of the loss.
    Logs ``sequence_mask_tis_weight``, ``sequence_mask_tis_cut``, the share of tokens in dropped rollouts, ``sequence_mask_tis_ratio``,
    the geometric means, and with a cap ``sequence_mask_tis_capped``, the share of tokens above it.
    """

    low: float = 0.999
    high: float = 1.002
    cap: float | None = None

    def __post_init__(self) -> None:
        check_ratio_range(self.low, self.high, "the geometric mean of w")
        if self.cap is not None and self.cap <= 0:
            raise ValueError(f"cap is {self.cap}: every weight would be 0 or negative; set it above 0, or to null for no cap")

    def weights(self, mismatch: Mismatch) -> tuple[Tensor, dict[str, Tensor]]:
        dtype = mismatch.log_ratio.dtype
        ratios, means = bounded_exp(log_ratios(mismatch)), geometric_mean_weights(mismatch)
        kept = (means >= self.low) & (means <= self.high)
        bounded = ratios if self.cap is None else ratios.clamp(max=self.cap)
        weights = torch.where(kept, bounded, 0.0).to(dtype)
        logged = {"weight": weights, "cut": (~kept).to(dtype), "ratio": means.to(dtype)}
        if self.cap is not None:
            logged["capped"] = (kept & (ratios > self.cap)).to(dtype)
        return weights, {f"sequence_mask_tis_{name}": column for name, column in logged.items()}
