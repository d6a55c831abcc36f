"""Training on the tokens with the largest entropy only (80/20, arXiv 2506.01939)."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.policy_gradient.parts import PolicyTokens, Selection
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class TopEntropy(Selection):
    """Selects the ``share`` of counted tokens with the largest entropy over the whole optimizer step.

    Selects at least one token, and all tokens that tie with the last selected one. The others still count in every total, as in the paper.
    TRL computes the quantile over each micro-batch. Logs tokens_selected.
    """

    share: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}: the share of tokens to train on must lie in (0, 1]")

    def choose(self, tokens: PolicyTokens) -> Tensor:
        counted = tokens.batch.mask > 0
        entropy = tokens.entropy.detach()
        if not bool(counted.any()):
            return torch.zeros_like(tokens.batch.mask)
        descending = entropy[counted].sort(descending=True).values
        threshold = descending[max(round(self.share * len(descending)), 1) - 1]
        return (counted & (entropy >= threshold)).to(tokens.batch.mask.dtype)
