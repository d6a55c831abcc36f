"""The columns that an algorithm requires."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from strop.algorithms.kl import KL_WEIGHT, KL_WEIGHT_NEXT
from strop.learner.client import AdaptedKlWeight, ColumnSources
from strop.types import Batch, Group
from support.rollouts import pack_grpo, simple_groups


@dataclass
class Source:
    name: str
    asked: list[str]

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        self.asked.append(f"{self.name} after {sorted(batch.columns)}")
        return {self.name: batch.rollout_logprobs + len(groups)}


def test_required_columns_are_filled_in_the_order_of_their_names_and_no_others() -> None:
    groups = simple_groups((4, (3, 1)))
    asked: list[str] = []
    sources = ColumnSources(
        frozenset({"values", "reference"}), {name: Source(name, asked) for name in ("values", "teacher", "reference")}
    )
    batch = asyncio.run(sources.fill(pack_grpo(groups), groups))
    assert asked == ["reference after []", "values after ['reference']"]
    assert (batch.column("values") == batch.rollout_logprobs + 1).all()


def test_a_weight_that_adapts_is_what_the_metrics_of_the_last_step_say() -> None:
    """A checkpoint has them, so a run that is continued has the weight that it would have had."""
    last: dict[str, float] = {}
    source = AdaptedKlWeight(0.1, lambda: last)
    groups = simple_groups((4, (3, 1)))
    batch = pack_grpo(groups)
    assert set(asyncio.run(source.columns(batch, groups))[KL_WEIGHT].tolist()) == {0.1}
    last[KL_WEIGHT_NEXT] = 0.12345678901234567
    assert set(asyncio.run(source.columns(batch, groups))[KL_WEIGHT].tolist()) == {0.12345678901234567}
