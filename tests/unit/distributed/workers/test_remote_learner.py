"""A learner on several ranks as the loop awaits it: what is sent to every rank, and how their answers are combined."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strop import metrics
from strop.algorithms.base import TokenOutputs
from strop.algorithms.policy_gradient.grpo import GRPO
from strop.data.shares import ShareRequest, SplitRule
from strop.distributed.workers.learner_worker import ColumnShard
from strop.distributed.workers.remote_learner import RankCaller, RemoteLearner
from strop.learner.budget.memory_probe import MemoryProbe
from strop.learner.client import ColumnClient, ScorerClient
from strop.learner.parallel.micro_batch import MicroBatchOutputs
from strop.types import Batch
from support.recorded import random_groups
from support.rollouts import pack_for

GROUPS = random_groups(3)
BATCH = pack_for(GROUPS, GRPO())
LOSS = GRPO().losses(0)["policy"]
RULE = SplitRule(ranks=2, token_budget=30, whole_groups=True)
METHODS = ("score", "forward_backward", "evaluate_loss", "columns")


class Reference:
    """What a cluster gives for a value that it stores."""

    def __init__(self, value: Any) -> None:
        self.value = value


class FakeRanks:
    """Two ranks, of which each answers for every second token; or four, of which two and two read the same tokens."""

    def __init__(self, count: int = 2) -> None:
        self.actors = [None] * count
        self.calls: list[tuple[Any, ...]] = []  # of the first rank
        self.sent: list[tuple[Any, ...]] = []  # to each rank by the last call
        self.stored = 0

    def put(self, value: Any) -> Reference:
        self.stored += 1
        return Reference(value)

    async def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        self.calls.append((method, *arguments[0]))
        self.sent = list(arguments)
        return [self._answer(method, rank) for rank in range(2)] + [MicroBatchOutputs()] * (len(self.actors) - 2)

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


def caller_of(ranks: Any, name: Any = "policy", *, read_columns: bool = True) -> RankCaller:
    requests = [ShareRequest(rule=RULE, number=rank % 2, read_columns=read_columns) for rank in range(len(ranks.actors))]
    return RankCaller(name, ranks, ranks, dict.fromkeys(METHODS, requests))


def client_of(ranks: Any) -> RemoteLearner:
    return RemoteLearner(caller_of(ranks))


def assert_shares(sent: Sequence[tuple[Any, ...]], batch: Batch) -> None:
    """Each rank is sent its own share, by reference, and together they are the batch."""
    shares = [arguments[1].value for arguments in sent]
    assert [share.number for share in shares] == list(range(len(sent)))
    places = torch.cat([share.index for share in shares])
    assert places.sort().values.tolist() == list(range(len(batch.target)))
    assert torch.equal(torch.cat([share.batch.target for share in shares]), batch.target[places])
    assert {share.batch.totals for share in shares} == {batch.totals}


def test_outputs_of_all_ranks_are_put_together_and_each_is_sent_its_share_by_reference() -> None:
    ranks = FakeRanks()
    scored: Any = asyncio.run(client_of(ranks).score(BATCH))
    assert scored.logprobs.tolist() == list(range(len(BATCH.target)))
    assert ranks.calls[0][:2] == ("score", "policy")
    assert_shares(ranks.sent, BATCH)


@pytest.mark.parametrize("method", ["forward_backward", "evaluate_loss"])
def test_results_of_all_ranks_are_merged(method: str) -> None:
    ranks = FakeRanks()
    result = asyncio.run(getattr(client_of(ranks), method)(BATCH, LOSS))
    assert metrics.to_floats(result.metrics) == {"tokens": len(BATCH.target)}
    assert result.outputs.logprobs.tolist() == list(range(len(BATCH.target)))
    assert ranks.calls[0][:2] == (method, "policy") and all(arguments[2] == LOSS for arguments in ranks.sent)
    assert_shares(ranks.sent, BATCH)


def test_a_step_is_what_the_first_rank_says() -> None:
    assert metrics.to_floats(asyncio.run(client_of(FakeRanks()).step())) == {"rank": 0.0}


def test_columns_come_from_the_ranks_that_computed_some() -> None:
    ranks: Any = FakeRanks()
    client = ColumnClient(caller_of(ranks, ("teacher", "column")))
    found = asyncio.run(client.columns(BATCH, GROUPS))["column"]
    assert found.tolist() == [place if place % 2 else 0 for place in range(len(BATCH.target))]
    assert ranks.calls[0][:2] == ("columns", ("teacher", "column"))
    assert_shares(ranks.sent, BATCH)


def test_ranks_that_read_the_same_tokens_are_sent_one_copy_of_their_share() -> None:
    ranks = FakeRanks(4)
    asyncio.run(client_of(ranks).score(BATCH))
    assert ranks.stored == 2
    assert ranks.sent[0][1] is ranks.sent[2][1] and ranks.sent[1][1] is ranks.sent[3][1]
    assert ranks.sent[0][1] is not ranks.sent[1][1]


@pytest.mark.parametrize("read_columns", [True, False])
def test_recorded_experts_travel_only_to_ranks_that_read_them(read_columns: bool) -> None:
    ranks = FakeRanks()
    batch = replace(BATCH, read_columns={"routes": torch.zeros(len(BATCH.tokens), 2, 1, dtype=torch.int16)})
    asyncio.run(ScorerClient(caller_of(ranks, read_columns=read_columns)).score(batch))
    assert [bool(arguments[1].value.batch.read_columns) for arguments in ranks.sent] == [read_columns] * 2


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
    with pytest.raises(RuntimeError, match="does not send its weights to the driver"):
        client_of(FakeRanks()).weights()


class ProbedRanks(FakeRanks):
    """Two ranks that measure their memory, and cut by the budget that they are given."""

    def _answer(self, method: str, rank: int) -> Any:
        if method == "probe_memory":
            sizes = {"device": "cpu", "tokens": 64, "gradient_bytes": 5, "optimizer_bytes": 10}
            return MemoryProbe(peak_bytes=100 + rank, free_bytes=1000 - rank, **sizes)
        if method == "set_train_tokens":
            return {"forward_backward": ShareRequest(rule=replace(RULE, token_budget=self.calls[-1][2]), number=rank)}
        return super()._answer(method, rank)


def test_what_the_worst_rank_measured_is_found_and_batches_are_divided_anew() -> None:
    """The driver divides batches: a budget that it did not know would make every rank refuse its share."""
    ranks = ProbedRanks()
    client = RemoteLearner(replace(caller_of(ranks), requests={}))
    probe = asyncio.run(client.probe_memory(1, 64))
    assert (probe.peak_bytes, probe.free_bytes) == (101, 999)
    asyncio.run(client.set_train_tokens(17))
    asyncio.run(client.forward_backward(BATCH, LOSS))
    assert [arguments[1].value.rule.token_budget for arguments in ranks.sent] == [17, 17]
    assert_shares(ranks.sent, BATCH)
