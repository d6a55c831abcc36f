"""The driver's side of a learner on several ranks, each of which runs a ``LearnerWorker``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.data.shares import ShareRequest, divide_batch, without_read_columns
from strop.distributed.actor_group import ActorGroup
from strop.distributed.base import Cluster
from strop.distributed.workers.learner_worker import RankTarget, merge_columns
from strop.learner.base import WeightSource
from strop.learner.budget.memory_probe import take_worst
from strop.learner.client import LearnerClient
from strop.learner.parallel.micro_batch import assemble_outputs, assemble_result
from strop.types import Batch
from strop.weight_sync.base import ChannelAddress, TransportError
from strop.weight_sync.exporter import Fingerprints, SentAdapters, TransferContent, TransferPlan
from strop.weight_sync.transports.channel import SplitAddress


@dataclass(frozen=True)
class RankCaller:
    """Calls a learner, a scorer or a column source on every rank, and combines the ranks' results.

    A batch is divided before sending: each rank receives only the share that it reads. Shares are passed by reference, so that ranks that
    read the same micro-batches are sent one copy, and a node reads it once.
    """

    name: RankTarget
    group: ActorGroup
    cluster: Cluster
    requests: dict[str, list[ShareRequest]]  # per rank, by the method that reads a batch; replaced after set_train_tokens

    async def call(self, method: str, *arguments: Any) -> Any:
        sent = arguments[:1] if method == "columns" else arguments  # the groups of a batch stay with the driver
        of_ranks = [self._put_shares(method, each) if isinstance(each, Batch) else None for each in sent]
        results = await self.group.call_each(
            method,
            [
                (self.name, *(each if shares is None else shares[rank] for each, shares in zip(sent, of_ranks, strict=True)))
                for rank in range(len(self.group.actors))
            ],
        )
        match method, *arguments:
            case "score", Batch() as batch:
                return assemble_outputs(results, len(batch.target))
            case "forward_backward" | "evaluate_loss", Batch() as batch, _:
                return assemble_result(results, len(batch.target))
            case "columns", Batch() as batch, _:
                return merge_columns([shard for shards in results for shard in shards], len(batch.target))
            case "probe_memory", *_:
                return take_worst(results)
            case "set_train_tokens", *_:
                self.requests.update({method: [requests[method] for requests in results] for method in results[0]})
                return None
            case _:
                return results[0]

    def _put_shares(self, method: str, batch: Batch) -> list[Any]:
        """Divide a batch and store each share once. Return a reference to the share of each rank."""
        requests = self.requests[method]
        if not requests[0].read_columns:
            batch = without_read_columns(batch)
        stored = [self.cluster.put(share) for share in divide_batch(batch, requests[0].rule)]
        return [stored[request.number] for request in requests]

    def call_sync(self, method: str, *arguments: Any) -> Any:
        resolved = [each.resolve() if isinstance(each, Path) else each for each in arguments]  # ranks have other working folders
        return self.group.call_all_sync(method, self.name, *resolved)[0]


@dataclass(frozen=True)
class RemoteLearner(LearnerClient):
    """A learner with its network and optimizer on the ranks."""

    caller: RankCaller

    def weights(self) -> WeightSource:
        raise RuntimeError(
            "a learner on several ranks does not send its weights to the driver; its exporter sends them to engines"
        )

    def stage(self, *, optimizer: bool = True) -> StagedLearner:
        """Copy the state to the ranks' CPU memory, to be written concurrently with training."""
        self.caller.call_sync("stage", optimizer)
        return StagedLearner(self.caller)


@dataclass(frozen=True)
class StagedLearner:
    """The staged state of a learner, in the CPU memory of its ranks."""

    caller: RankCaller

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        caller = self.caller
        caller.group.call_all_sync("write_staged", caller.name, folder.resolve(), optimizer, urgent=True)


@dataclass(frozen=True)
class RemoteMemory:
    """The device memory of all ranks, as ``LearnerMemory``."""

    group: ActorGroup

    async def offload(self) -> None:
        await self.group.call_all("offload")

    async def onload(self) -> None:
        await self.group.call_all("onload")


class RemoteExporter:
    """The learner's side of a publish. Some ranks send, each its part of the tensors; all take part in gathering them."""

    def __init__(self, group: ActorGroup, senders: Sequence[int] = (0,)) -> None:
        """``senders``: the sending ranks, in the order used to distribute tensors."""
        self.group = group
        self.senders = tuple(senders)

    async def prepare(self, content: TransferContent) -> TransferPlan:
        plan: TransferPlan = (await self.group.call_all("prepare_export", content))[0]
        return plan

    async def open(self, receivers: int) -> ChannelAddress:
        addresses: list[ChannelAddress] = [await self.group.call_one(rank, "open_sender", receivers) for rank in self.senders]
        return addresses[0] if len(addresses) == 1 else SplitAddress(tuple(addresses))

    async def send(self, *, read_back: bool) -> Fingerprints:
        results: list[Fingerprints | TransportError] = await self.group.call_all("send", read_back)
        sent: dict[str, int] = {}
        to_read_back: dict[str, int] = {}
        experts: dict[str, tuple[int, ...]] = {}
        for result in results:
            if isinstance(result, TransportError):
                raise result
            sent |= result.sent
            to_read_back |= result.read_back
            experts |= result.experts
        return Fingerprints(sent, to_read_back, experts)

    async def export_adapters(self, *, resend: bool) -> SentAdapters:
        adapters: SentAdapters = (await self.group.call_all("export_adapters", resend))[0]
        return adapters

    async def close(self) -> None:
        await asyncio.gather(*(self.group.call_one(rank, "close_export", urgent=True) for rank in self.senders))
