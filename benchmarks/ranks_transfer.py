"""What a batch and a publish over several ranks move, in real processes: Ray actors and gloo, on one machine.

    python benchmarks/ranks_transfer.py [--ranks 4] [--prompts 64] [--layers 8] [--width 512] [--repeats 5] [--json results.json]

A batch: the driver sends it to the ranks and gets their outputs back, as whole batches to every rank (before) and as the share of each
(now). The ranks compute nothing, so the seconds are those of dividing, storing, travelling and cutting micro-batches. Bytes are those that
Ray stores, and that each rank reads out of the store.

A publish: a model with random weights, sharded by FSDP2 over the ranks, goes to one receiver in a process of its own. Before: all ranks
gather every tensor whole, and rank 0 sends it. Now: each tensor is gathered by the rank that sends it, and 1, 2 or all ranks send. Bytes
are those that each rank receives from its peers and sends to the receiver. What arrives is compared by fingerprints.

The ways alternate, so that a busy machine disturbs all of them alike; ratios are of neighbours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # actors import this file by name

import torch
from common import spread, table
from ranks_simulation import make_batch
from torch import Tensor

from strop.algorithms.base import TokenOutputs
from strop.data.shares import BatchShare, ShareRequest, SplitRule, divide_batch, take_share
from strop.distributed.actor_group import ActorGroup
from strop.distributed.base import ActorOptions, serve_store
from strop.distributed.cluster_config import ClusterConfig
from strop.distributed.workers.remote_learner import RankCaller, RemoteExporter
from strop.learner.client import LearnerClient
from strop.learner.parallel.micro_batch import MicroBatchOutputs
from strop.types import Batch
from strop.weight_sync.base import ChannelAddress, Manifest
from strop.weight_sync.exporter import BlockingExporter, Fingerprints, SenderRole, TransferPlan
from strop.weight_sync.fingerprints import fingerprint
from strop.weight_sync.transports.host_memory import MemorySender

dist: Any = torch.distributed
TOKEN_BUDGET = 8192


@dataclass(frozen=True)
class Way:
    """One way to move something."""

    name: str
    seconds: tuple[float, ...]
    rank_bytes: Sequence[int]  # received by each rank
    sent_bytes: Sequence[int] = ()  # sent to the receiver by each rank

    def row(self, before: Way) -> list[str]:
        ratios = spread(old / new for old, new in zip(before.seconds, self.seconds, strict=True))
        received = " ".join(f"{size / 1e6:.1f}" for size in self.rank_bytes)
        sent = " ".join(f"{size / 1e6:.1f}" for size in self.sent_bytes)
        return [self.name, f"{median(self.seconds):.3f}", str(ratios), received, sent]


class TransferRank:
    """A rank that moves batches and weights, and computes nothing."""

    def __init__(self, rank: int, world: int) -> None:
        torch.set_num_threads(1)
        self.rank, self.world = rank, world
        self.received = 0  # bytes from other ranks

    # --- batches ----------------------------------------------------------------------------------------------------------

    def score(self, name: str, batch: Batch | BatchShare) -> MicroBatchOutputs:
        """Cut this rank's micro-batches and answer with outputs of the right shapes."""
        share = take_share(batch, split_rule(self.world), self.rank)
        parts = [part for part, _ in share.micro_batches() if part is not None]
        zeros = [torch.zeros(len(part.index)) for part in parts]
        return MicroBatchOutputs(
            tuple((part.index, TokenOutputs(zero, zero)) for part, zero in zip(parts, zeros, strict=True)), {}
        )

    # --- weights ----------------------------------------------------------------------------------------------------------

    def open_store(self, host: str) -> int:
        self._store = serve_store(host, self.world, 300)
        return int(self._store.port)

    def shard(self, host: str, port: int, layers: int, width: int) -> int:
        """Make and shard the model. Return its bytes."""
        store = self._store if self.rank == 0 else dist.TCPStore(host, port, self.world, False)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world)
        from transformers import LlamaConfig, LlamaForCausalLM

        from strop.learner.parallel.export.sharded_export import ShardedWeights
        from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
        from strop.learner.parallel.sharded import parallelize_network
        from strop.models.network import Network

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=16_384,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
        network = Network(LlamaForCausalLM(config))
        sharded = parallelize_network(network, DeviceMeshes(ParallelDims(shard=self.world), "cpu"))
        self.weights = ShardedWeights(sharded)
        self.exporters: dict[str, BlockingExporter] = {}
        count_received(self)
        return sum(weight.nbytes for weight in self.weights.iter_weights())

    def make_exporter(self, way: str, senders: tuple[int, ...], gather_everywhere: bool) -> None:
        from dataclasses import replace

        def weights() -> Any:
            found = self.weights.iter_weights()
            return (replace(each, begin_gather=None) for each in found) if gather_everywhere else found

        role = SenderRole(self.rank, senders)
        self.exporters[way] = BlockingExporter(weights, MemorySender, dtype=torch.float32, role=role)

    def use(self, way: str) -> None:
        self._export = self.exporters[way]
        self.received = 0

    def prepare_export(self, content: Any) -> TransferPlan:
        return self._export.prepare(content)

    def open_sender(self, receivers: int) -> ChannelAddress:
        return self._export.open(receivers)

    def send(self, read_back: bool) -> Fingerprints:
        return self._export.send(read_back=read_back)

    def close_export(self) -> None:
        self._export.close()

    def moved(self) -> tuple[int, int]:
        """Return the bytes received from other ranks, and sent to the receiver, since ``use``."""
        return self.received, self._export._own_manifest().nbytes


def count_received(rank: TransferRank) -> None:
    """Count the bytes that this rank receives from others, by the operations that gather weights."""
    from strop.learner.parallel.export import sharded_export
    from strop.learner.parallel.sharded import Sharded

    post, full_tensor = sharded_export._post, Sharded.full_tensor

    def counted_post(operations: Sequence[Any]) -> list[Any]:
        rank.received += sum(each.tensor.nbytes for each in operations if each.op is dist.irecv)
        return post(operations)

    def counted_full_tensor(sharded: Sharded, tensor: Tensor) -> Tensor:
        full = full_tensor(sharded, tensor)
        rank.received += full.nbytes - full.nbytes // rank.world
        return full

    sharded_export._post = counted_post
    Sharded.full_tensor = counted_full_tensor  # type: ignore[method-assign]


class TransferReceiver:
    """An engine's process: copies what arrives into memory of its own."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.tensors: dict[str, Tensor] = {}

    def connect(self, address: ChannelAddress) -> None:
        self.receiver = address.connect(0, torch.device("cpu"))

    def load(self, manifest: Manifest) -> dict[str, int]:
        fingerprints = {}
        for name, tensor in self.receiver.receive(manifest):
            fingerprints[name] = fingerprint(tensor)
            self.tensors.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
        return fingerprints


class WholeBatches(RankCaller):
    """Sends whole batches to every rank, as it was before they were divided."""

    def _put_shares(self, method: str, batch: Batch) -> list[Any]:
        return [self.cluster.put(batch)] * len(self.group.actors)


def split_rule(ranks: int) -> SplitRule:
    return SplitRule(ranks=ranks, token_budget=TOKEN_BUDGET)


def alternate(ways: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each way, taken in turn, forwards and backwards; the first turn is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name in list(ways) if turn % 2 == 0 else list(reversed(ways)):
            started = time.perf_counter()
            ways[name]()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return {name: tuple(taken) for name, taken in seconds.items()}


def measure_batches(run: Callable[[Any], Any], cluster: Any, group: ActorGroup, batch: Batch, repeats: int) -> list[Way]:
    world = len(group.actors)
    requests = {"score": [ShareRequest(rule=split_rule(world), number=number) for number in range(world)]}
    clients = {
        "whole batches": LearnerClient(WholeBatches("policy", group, cluster, requests)),
        "shares": LearnerClient(RankCaller("policy", group, cluster, requests)),
    }
    seconds = alternate({name: lambda client=client: run(client.score(batch)) for name, client in clients.items()}, repeats)
    whole = len(pickle.dumps(batch, protocol=5))
    shares = [len(pickle.dumps(share, protocol=5)) for share in divide_batch(batch, split_rule(world))]
    return [Way("whole batches", seconds["whole batches"], [whole] * world), Way("shares", seconds["shares"], shares)]


def measure_publishes(run: Callable[[Any], Any], group: ActorGroup, receiver: Any, repeats: int) -> list[Way]:
    world = len(group.actors)
    senders = {f"{count} sending": tuple(number * world // count for number in range(count)) for count in sorted({1, 2, world})}
    ways = {"rank 0, gathered by all": ((0,), True), **{name: (ranks, False) for name, ranks in senders.items()}}
    moved: dict[str, Any] = {}

    async def publish(way: str) -> None:
        exporter = RemoteExporter(group, ways[way][0])
        plan = await exporter.prepare("weights")
        sent, arrived = await asyncio.gather(exporter.send(read_back=False), receiver.call("load", plan.manifest))
        assert sent.sent == arrived and len(arrived) == len(plan.manifest.entries), "every tensor arrives as it was sent"

    async def open_channel(way: str) -> None:
        await group.call_all("use", way)
        await receiver.call("connect", await RemoteExporter(group, ways[way][0]).open(1))

    def turn(way: str) -> None:
        run(publish(way))
        moved[way] = run(group.call_all("moved"))

    for way, (ranks, everywhere) in ways.items():
        run(group.call_all("make_exporter", way, ranks, everywhere))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(repeats + 1):
        for way in list(ways) if number % 2 == 0 else list(reversed(ways)):
            run(open_channel(way))
            started = time.perf_counter()
            turn(way)
            if number:
                seconds[way].append(time.perf_counter() - started)
            run(RemoteExporter(group, ways[way][0]).close())
    return [
        Way(way, tuple(seconds[way]), [received for received, _ in moved[way]], [sent for _, sent in moved[way]]) for way in ways
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64, help="of the batch, with 16 completions of 256 tokens each")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)

    from strop.distributed.ray import connect

    loop = asyncio.new_event_loop()
    run = loop.run_until_complete
    cluster = run(connect(ClusterConfig(gpus_per_node=options.ranks), on_cpu=True))
    try:
        environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        spawn = [ActorOptions(name=f"rank-{rank}", node=0, environment=environment) for rank in range(options.ranks)]
        actors = [run(cluster.spawn(each, TransferRank, rank, options.ranks)) for rank, each in enumerate(spawn)]
        receiver = run(cluster.spawn(ActorOptions(name="receiver", node=0, environment=environment), TransferReceiver))
        group = ActorGroup("learner", actors)
        batches = measure_batches(run, cluster, group, make_batch(options.prompts), options.repeats)
        port = run(group.call_one(0, "open_store", actors[0].address))
        (size, *_) = run(group.call_all("shard", actors[0].address, port, options.layers, options.width))
        publishes = measure_publishes(run, group, receiver, options.repeats)
    finally:
        run(cluster.close())
    report(options, batches, publishes, size)


def report(options: argparse.Namespace, batches: Sequence[Way], publishes: Sequence[Way], size: int) -> None:
    header = ["", "seconds", "times faster", "received by each rank, MB", "sent by each rank, MB"]
    print(f"\na batch of {options.prompts * 16} rollouts, {options.ranks} ranks\n")
    print(table(header[:4], [way.row(batches[0])[:4] for way in batches]))
    print(f"\na publish of {size / 1e6:.0f} MB, {options.ranks} ranks, one receiver\n")
    print(table(header, [way.row(publishes[0]) for way in publishes]))
    if options.json is not None:
        options.json.write_text(
            json.dumps({"batches": [vars(way) for way in batches], "publishes": [vars(way) for way in publishes]})
        )


if __name__ == "__main__":
    from ranks_transfer import main as run_main  # by name, so that actors find the classes

    run_main()
