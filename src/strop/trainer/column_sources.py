"""The columns that an algorithm requires, and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.algorithms.kl import KL_WEIGHT, KL_WEIGHT_NEXT
from strop.algorithms.policy_gradient.turns import make_step_columns, make_turn_advantages, make_turn_columns
from strop.learner.client import AsyncColumnSource
from strop.types import Batch, Group


@dataclass(frozen=True)
class AdaptedKlWeight:
    """The KL_WEIGHT column: the weight of an adaptive KL term, taken from the last step's metrics, which checkpoints hold."""

    first: float
    last_metrics: Callable[[], Mapping[str, float]]

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        weight = self.last_metrics().get(KL_WEIGHT_NEXT, self.first)
        return {KL_WEIGHT: torch.full((len(batch.target),), weight, dtype=torch.float64)}


@dataclass(frozen=True)
class ColumnSources:
    """A source for each required column: a frozen reference, a critic, a teacher, a file."""

    required: frozenset[str]  # ``Algorithm.requires``
    sources: Mapping[str, AsyncColumnSource]

    async def fill(self, batch: Batch, groups: Sequence[Group]) -> Batch:
        """Return the batch with all required columns, computed in the order of their names, and with step rewards, and turn
        boundaries if there are several turns. ``batch`` was packed from ``groups``.
        """
        batch = batch.with_columns(
            {
                **make_step_columns(batch, groups),
                **make_turn_columns(batch, groups),
                **make_turn_advantages(batch, groups),
            }
        )
        for name in sorted(self.required):
            batch = batch.with_columns(await self.sources[name].columns(batch, groups))
        return batch
