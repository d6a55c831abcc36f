"""DiscoPOP, the log-ratio modulated loss that a language model discovered (arXiv 2406.08414, equation 5)."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.functional import bounded_exp
from strop.algorithms.preference.base import require_positive
from strop.algorithms.preference.referenced import ComparedPreference
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class DiscoPOP(ComparedPreference):
    """(1 - w) x -log sigmoid(m) + w exp(-m), with m = beta (h(chosen) - h(rejected)) and w = sigmoid(m / ``tau``).

    Pairs with a negative margin have DPO's loss, those with a positive one an exponential loss. It is not convex: with ``tau`` below 0.1,
    as in the paper, it has a local minimum at a small negative margin, and its gradient at margin 0 lowers the margin.
    """

    tau: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("tau", self.tau)

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        margin = self.beta * (chosen - rejected)
        exponential = (margin / self.tau).sigmoid()
        return -torch.nn.functional.logsigmoid(margin) * (1 - exponential) + bounded_exp(-margin) * exponential
