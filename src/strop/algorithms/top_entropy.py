"""Only the tokens where the policy is undecided are trained on (80/20, arXiv 2506.01939)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strop.algorithms.parts import PolicyTokens, Selection


@dataclass(frozen=True, kw_only=True)
class TopEntropy(Selection):
    """The ``share`` of counted tokens with the largest entropy over the whole optimizer step, at least one; ties with the last
    too.

    The others count in every total, as in the paper. TRL takes the quantile over each micro-batch. Logged: tokens_selected.
    """

    share: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"a share of {self.share} of the tokens is to be trained on; it must lie in (0, 1]")

    def choose(self, tokens: PolicyTokens) -> Tensor:
        counted = tokens.batch.mask > 0
        entropy = tokens.entropy.detach()
        if not bool(counted.any()):
            return torch.zeros_like(tokens.batch.mask)
        descending = entropy[counted].sort(descending=True).values
        threshold = descending[max(round(self.share * len(descending)), 1) - 1]
        return (counted & (entropy >= threshold)).to(tokens.batch.mask.dtype)
