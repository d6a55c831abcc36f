"""A learner on several ranks as the loop awaits it: what is sent to every rank, and how their answers are combined."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from strop import metrics
from strop.algorithms.base import TokenOutputs
from strop.algorithms.preference.dpo import DPO
from strop.distributed.workers.column_shards import ColumnShard
from strop.distributed.workers.remote_learner import RankCaller, RemoteLearner
from strop.learner.client import ColumnClient
from strop.learner.parallel.micro_batch import MicroBatchOutputs
from support.recorded import random_groups
from support.rollouts import pack_for

GROUPS = random_groups(3)
BATCH = pack_for(GROUPS, DPO())
LOSS = DPO().losses(0)["policy"]


class Reference:
    """What a cluster gives for a value that it stores."""

    def __init__(self, value: Any) -> None:
        self.value = value


class FakeRanks:
    """Two ranks, of which each answers for every second token."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def put(self, value: Any) -> Reference:
        return Reference(value)

    async def call_all(self, method: str, name: Any, *arguments: Any) -> list[Any]:
        self.calls.append((method, name, *arguments))
        return [self._answer(method, rank) for rank in range(2)]

    def call_all_sync(self, method: str, name: Any, *arguments: Any, urgent: bool = False) -> list[Any]:
        self.calls.append((method, name, *arguments, urgent))
        return [None, None]

    def _answer(self, method: str, rank: int) -> Any:
        index = torch.arange(rank, len(BATCH.target), 2)
        if method == "columns":
            return [ColumnShard(index, {"column": index.float()})] if rank else []
        if method == "step":
            return {"rank": metrics.mean(float(rank), 1)}
        outputs = TokenOutputs(index.float(), torch.zeros(len(index)))
        return MicroBatchOutputs(((index, outputs),), {"tokens": metrics.total(len(index))})


def client_of(ranks: Any) -> RemoteLearner:
    return RemoteLearner(RankCaller("policy", ranks, ranks))


def arguments_of(call: Sequence[Any]) -> list[Any]:
    return [each.value if isinstance(each, Reference) else each for each in call]


def test_outputs_of_all_ranks_are_put_together_and_batches_are_sent_by_reference() -> None:
    ranks = FakeRanks()
    scored: Any = asyncio.run(client_of(ranks).score(BATCH))
    assert scored.logprobs.tolist() == list(range(len(BATCH.target)))
    assert isinstance(ranks.calls[0][2], Reference) and arguments_of(ranks.calls[0]) == ["score", "policy", BATCH]


@pytest.mark.parametrize("method", ["forward_backward", "evaluate_loss"])
def test_results_of_all_ranks_are_merged(method: str) -> None:
    ranks = FakeRanks()
    result = asyncio.run(getattr(client_of(ranks), method)(BATCH, LOSS))
    assert metrics.to_floats(result.metrics) == {"tokens": len(BATCH.target)}
    assert result.outputs.logprobs.tolist() == list(range(len(BATCH.target)))
    assert isinstance(ranks.calls[0][2], Reference) and arguments_of(ranks.calls[0]) == [method, "policy", BATCH, LOSS]


def test_a_step_is_what_the_first_rank_says() -> None:
    assert metrics.to_floats(asyncio.run(client_of(FakeRanks()).step())) == {"rank": 0.0}


def test_columns_come_from_the_ranks_that_computed_some() -> None:
    ranks: Any = FakeRanks()
    client = ColumnClient(RankCaller(("teacher", "column"), ranks, ranks))
    found = asyncio.run(client.columns(BATCH, GROUPS))["column"]
    assert found.tolist() == [place if place % 2 else 0 for place in range(len(BATCH.target))]
    assert isinstance(ranks.calls[0][2], Reference) and arguments_of(ranks.calls[0]) == ["columns", ("teacher", "column"), BATCH]


def test_a_checkpoint_is_written_by_every_rank_at_once_or_from_a_staged_copy(tmp_path: Path) -> None:
    ranks = FakeRanks()
    client = client_of(ranks)
    client.save(tmp_path / ".." / tmp_path.name, optimizer=False)
    client.load(tmp_path)
    client.stage(optimizer=True).save(tmp_path, optimizer=True)
    assert ranks.calls == [
        ("save", "policy", tmp_path, False, False),
        ("load", "policy", tmp_path, False),
        ("stage", "policy", True, False),
        ("write_staged", "policy", tmp_path, True, True),
    ]


def test_the_driver_has_no_weights() -> None:
    with pytest.raises(RuntimeError, match="does not give its weights to the driver"):
        client_of(FakeRanks()).weights()
