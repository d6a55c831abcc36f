"""Anchored Preference Optimization, zero (arXiv 2408.06266), on completions that were judged one by one."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.base import TokenOutputs
from strop.algorithms.preference.unpaired.kto import KTO, REFERENCE_POINT
from strop.lazy_torch import torch
from strop.types import Batch


@dataclass(frozen=True, kw_only=True)
class APOZeroUnpaired(KTO):
    """desirable: weight (1 - sigmoid(beta h)); undesirable: weight sigmoid(beta h); mean over completions: KTO with the reference point 0.

    It needs no estimate of the KL divergence. It is for desirable completions that are better than what the policy writes.
    """

    @property
    def needs_step_outputs(self) -> bool:
        return False

    def prepare_step(self, batch: Batch, outputs: TokenOutputs | None) -> Batch:
        return batch.with_column(REFERENCE_POINT, torch.zeros(len(batch.target), dtype=torch.float64))
