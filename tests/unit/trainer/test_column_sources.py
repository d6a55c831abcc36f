"""The columns that an algorithm requires."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from strop.trainer.column_sources import ColumnSources
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
