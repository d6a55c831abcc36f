"""The precision of published weights: the learner's, rounded to the number format that rollouts are sampled with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.models.quantization.quantization_plan import QuantizationPlan


@dataclass(frozen=True)
class SentPrecision:
    """How the weights of a publish are quantised, and where."""

    plan: QuantizationPlan
    dtype: torch.dtype  # that the engine computes in: weights are cast to it and then rounded
    by_engine: (
        bool  # the engine quantises what arrives, in its own kernels' layout; else it is sent values that are rounded already
    )

    def select(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names of weights that are quantised, of all names of a publish."""
        return self.plan.select(names)

    def round(self, tensor: Tensor) -> Tensor:
        """Return a selected weight as the engine computes with it, in its own data type."""
        return self.plan.round_weight(tensor.to(self.dtype)).to(tensor.dtype)
