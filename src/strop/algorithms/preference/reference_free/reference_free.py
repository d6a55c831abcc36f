"""The base class of pair losses without a reference, and AlphaPO's shape of their reward."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.base import TokenOutputs
from strop.algorithms.functional import MAX_EXPONENT
from strop.algorithms.preference.base import PairwisePreference, check_label_smoothing, require_positive
from strop.lazy_torch import Tensor, torch
from strop.types import Batch


@dataclass(frozen=True, kw_only=True)
class ReferenceFreePreference(PairwisePreference):
    """Base class of pair losses on log pi without a reference. ``beta`` is the scale of the reward.

    ``alpha`` shapes the reward as in AlphaPO (arXiv 2501.03884): h = (1 - p^-alpha) / alpha with p = exp(log pi), which is log pi itself
    for 0. ``label_smoothing`` is the share of pairs whose label is wrong, as in cDPO.
    """

    beta: float
    alpha: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("beta", self.beta)
        check_label_smoothing(self.label_smoothing)

    @property
    def reward_scale(self) -> float:
        return self.beta

    def scores(self, outputs: TokenOutputs, batch: Batch) -> Tensor:
        logprobs = super().scores(outputs, batch)
        return logprobs if not self.alpha else -torch.expm1((-self.alpha * logprobs).clamp(max=MAX_EXPONENT)) / self.alpha
