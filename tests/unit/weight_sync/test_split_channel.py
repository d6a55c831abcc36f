"""Weights from several senders at once: everything arrives, nobody waits for anybody in a circle, and a failure of one ends all."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from strop.distributed.workers.remote_learner import RemoteExporter
from strop.weight_sync.base import ChannelAddress, EngineDied, LoadReceipt, Manifest, Sender, TensorEntry, TransportError
from strop.weight_sync.exporter import BlockingExporter, Fingerprints, SenderRole
from strop.weight_sync.fingerprints import fingerprint
from strop.weight_sync.publisher import PublishOptions, WeightPublisher
from strop.weight_sync.transports.broadcast import BroadcastSender
from strop.weight_sync.transports.channel import SplitAddress, SplitReceiver
from strop.weight_sync.transports.host_memory import MemorySender
from strop.weight_sync.transports.manifest import build_manifest, deal_entries, split_manifest
from strop.weight_sync.transports.shared_folder import FolderSender
from strop.weight_sync.verification import VerificationFailed
from strop.weight_sync.weight_source import local_weights
from strop.weight_sync.weight_sync_config import WeightSyncConfig
from support.transports import CPU, expected_fingerprints, make_manifest, make_tensors

MANIFEST = make_manifest()
SMALL = 4096  # bytes of a bucket: less than one large tensor


def make_senders(kind: str, folder: Path, count: int, receivers: int, broadcast_timeout: float = 5) -> list[Sender]:
    makers: Mapping[str, Callable[[], Sender]] = {
        "memory": lambda: MemorySender(receivers, bucket_size=SMALL, slots=2, timeout=20),
        "broadcast": lambda: BroadcastSender(
            receivers, bucket_size=SMALL, timeout=broadcast_timeout
        ),  # in one process, gloo sees a failure only then
        "folder": lambda: FolderSender(folder, receivers, file_size=SMALL, timeout=20),
    }
    return [makers[kind]() for _ in range(count)]


def parts_of(tensors: Sequence[tuple[str, Tensor]], count: int) -> list[tuple[Manifest, list[tuple[str, Tensor]]]]:
    named = dict(tensors)
    return [(part, [(name, named[name]) for name in part.names]) for part in split_manifest(MANIFEST, count)]


def connect(senders: Sequence[Sender], index: int = 0) -> SplitReceiver:
    return SplitAddress(tuple(sender.address for sender in senders)).connect(index, CPU)


def receive(receiver: SplitReceiver) -> dict[str, int]:
    return {name: fingerprint(tensor) for name, tensor in receiver.receive(MANIFEST)}


# --- who sends what --------------------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 400), max_size=30), senders=st.integers(1, 6))
def test_every_tensor_has_one_sender_and_no_sender_more_than_an_even_share_and_one_tensor(sizes: list[int], senders: int) -> None:
    manifest = Manifest(tuple(TensorEntry(f"t{number}", torch.bfloat16, (size,)) for number, size in enumerate(sizes)))
    parts = split_manifest(manifest, senders)
    assert len(parts) == senders and sum(len(part.entries) for part in parts) == len(sizes)
    order = {name: number for number, name in enumerate(manifest.names)}
    for part in parts:
        assert [order[name] for name in part.names] == sorted(order[name] for name in part.names), "in the manifest's order"
    largest = max((entry.nbytes for entry in manifest.entries), default=0)
    assert max(part.nbytes for part in parts) <= manifest.nbytes / senders + largest
    owners = deal_entries(manifest, senders)
    assert all(entry.name in parts[owner].names for entry, owner in zip(manifest.entries, owners, strict=True))


# --- transfers -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "broadcast", "folder"])
@pytest.mark.parametrize("count", [2, 3])
def test_every_receiver_gets_every_tensor_publish_after_publish(kind: str, count: int, tmp_path: Path) -> None:
    senders = make_senders(kind, tmp_path, count, receivers=2)
    with ThreadPoolExecutor(count + 2) as pool:
        receivers = list(pool.map(lambda index: connect(senders, index), range(2)))
        for seed in range(3):
            tensors = make_tensors(seed)
            sending = [pool.submit(s.send, *part) for s, part in zip(senders, parts_of(tensors, count), strict=True)]
            reading = [pool.submit(receive, receiver) for receiver in receivers]
            wanted = expected_fingerprints(tensors, MANIFEST)
            assert [each.result(30) for each in reading] == [wanted, wanted]
            for each in sending:
                each.result(30)
        for receiver in receivers:
            receiver.close()
        for sender in senders:
            sender.close()


def test_senders_that_need_each_other_for_every_tensor_do_not_wait_in_a_circle(tmp_path: Path) -> None:
    """As ranks gather each other's shards: no rank gets its next tensor before all have come as far in the manifest."""
    count, tensors = 3, make_tensors(1)
    senders = make_senders("memory", tmp_path, count, receivers=1)
    lockstep = threading.Barrier(count)
    owners, named = deal_entries(MANIFEST, count), dict(tensors)

    def gather(own: int) -> Iterator[tuple[str, Tensor]]:
        for entry, owner in zip(MANIFEST.entries, owners, strict=True):
            lockstep.wait(20)
            if owner == own:
                yield entry.name, named[entry.name]

    def send(number: int) -> None:
        tensors = gather(number)
        senders[number].send(split_manifest(MANIFEST, count)[number], tensors)

    with ThreadPoolExecutor(count) as pool:
        receiver = connect(senders)
        sending = [pool.submit(send, number) for number in range(count)]
        found = receive(receiver)
        # a sender's last tensors may come before the end of the manifest: its iterator is read to the end by match_tensors
        for each in sending:
            each.result(30)
    assert found == expected_fingerprints(tensors, MANIFEST)


def start_all(pool: ThreadPoolExecutor, senders: Sequence[Sender], tensors: Any, broken: int | None) -> list[Future[None]]:
    def spoil(part: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        yield part[0]
        raise TransportError("a shard did not arrive")

    return [
        pool.submit(sender.send, part, spoil(own) if number == broken else own)
        for number, (sender, (part, own)) in enumerate(zip(senders, parts_of(tensors, len(senders)), strict=True))
    ]


@pytest.mark.parametrize("kind", ["memory", "broadcast"])
def test_a_sender_that_fails_ends_the_publish_of_all(kind: str, tmp_path: Path) -> None:
    senders = make_senders(kind, tmp_path, 3, receivers=1, broadcast_timeout=3)
    started = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        receiver = connect(senders)
        sending = start_all(pool, senders, make_tensors(0), broken=1)
        with pytest.raises(TransportError):
            receive(receiver)
        for sender in senders:  # as the channel does when one side has failed
            sender.close()
        with pytest.raises(TransportError, match="a shard did not arrive"):
            sending[1].result(30)
        for each in (sending[0], sending[2]):
            error = each.exception(30)
            assert error is None or isinstance(error, TransportError)
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("kind", ["memory", "broadcast"])
def test_a_reader_that_stops_ends_the_publish_of_all_senders(kind: str, tmp_path: Path) -> None:
    senders = make_senders(kind, tmp_path, 2, receivers=1)
    with ThreadPoolExecutor(2) as pool:
        receiver = connect(senders)
        sending = start_all(pool, senders, make_tensors(0), broken=None)
        reading = receiver.receive(MANIFEST)
        next(reading)
        reading.close()  # type: ignore[attr-defined]
        for sender in senders:
            sender.close()
        for each in sending:
            assert isinstance(each.exception(30), TransportError)


def test_a_sender_that_is_gone_is_found_when_the_engine_connects(tmp_path: Path) -> None:
    senders = make_senders("memory", tmp_path, 2, receivers=1)
    address = SplitAddress(tuple(sender.address for sender in senders))
    senders[1].close()
    with pytest.raises(TransportError, match="there is no sender"):
        address.connect(0, CPU)
    senders[0].close()


# --- publishes of several ranks -----------------------------------------------------------------------------------------------


class Ranks:
    """Ranks of a learner, each an exporter of the same weights in a thread of its own."""

    def __init__(self, senders: tuple[int, ...], world: int, *, keep_snapshot: bool = False) -> None:
        self.tensors = dict(make_tensors(0))
        self.actors = [
            BlockingExporter(
                lambda: local_weights(self.tensors.items()),
                lambda receivers: MemorySender(receivers, bucket_size=SMALL, timeout=20),
                dtype=torch.bfloat16,
                keep_snapshot=keep_snapshot,
                role=SenderRole(rank, senders),
            )
            for rank in range(world)
        ]
        self.loses = ""  # a tensor that a rank forgets to report

    async def call_all(self, method: str, *arguments: Any) -> list[Any]:
        return list(await asyncio.gather(*(self.call_one(rank, method, *arguments) for rank in range(len(self.actors)))))

    async def call_one(self, rank: int, method: str, *arguments: Any, urgent: bool = False) -> Any:
        return await asyncio.to_thread(self._call, self.actors[rank], method, *arguments)

    def _call(self, exporter: BlockingExporter, method: str, *arguments: Any) -> Any:
        match method:
            case "prepare_export":
                return exporter.prepare(*arguments)
            case "open_sender":
                return exporter.open(*arguments)
            case "close_export":
                return exporter.close()
        try:
            sent = exporter.send(read_back=arguments[0])
        except TransportError as error:
            return error
        return Fingerprints({name: value for name, value in sent.sent.items() if name != self.loses}, sent.read_back)


class HoldingEngine:
    """Holds what it receives."""

    receivers = 1
    name = "engine 0"

    def __init__(self) -> None:
        self.alive, self.dies = False, False
        self.tensors: dict[str, Tensor] = {}
        self._receiver: Any = None

    async def start(self) -> None:
        self.alive = True

    async def close(self) -> None:
        self.alive = False

    async def connect(self, address: ChannelAddress, first: int) -> None:
        self._receiver = await asyncio.to_thread(address.connect, first, CPU)

    async def load(self, manifest: Manifest, version: int) -> LoadReceipt:
        self.tensors = await asyncio.to_thread(self._take, manifest)
        marks = {name: (fingerprint(tensor),) for name, tensor in self.tensors.items()}
        return LoadReceipt(version=version, fingerprints=marks, seconds=0.0)

    def _take(self, manifest: Manifest) -> dict[str, Tensor]:
        taken = {}
        for name, tensor in self._receiver.receive(manifest):
            taken[name] = tensor.clone()
            if self.dies:
                self.alive = self.dies = False
                raise EngineDied("engine 0 died")
        return taken

    async def read_back_fingerprints(self) -> dict[str, Any]:
        return {}

    async def pause(self, *, keep_running: bool) -> None: ...

    async def resume(self, version: int) -> None: ...


def publisher_of(ranks: Any, engine: Any, senders: Sequence[int], *, async_training: bool = False) -> WeightPublisher:
    options = PublishOptions(separate_devices=True, async_training=async_training)
    return WeightPublisher(RemoteExporter(ranks, senders), [engine], WeightSyncConfig(proof="first"), options)


def assert_holds(engine: HoldingEngine, tensors: Mapping[str, Tensor]) -> None:
    manifest = build_manifest(tensors.items(), torch.bfloat16)
    assert {name: fingerprint(tensor) for name, tensor in engine.tensors.items()} == expected_fingerprints(
        list(tensors.items()), manifest
    )


@pytest.mark.parametrize(("senders", "world"), [((0,), 3), ((0, 2), 4), ((0, 1, 2), 3)])
@pytest.mark.parametrize("async_training", [False, True])
def test_an_engine_holds_what_all_ranks_have_sent(senders: tuple[int, ...], world: int, async_training: bool) -> None:
    async def publish() -> None:
        ranks, engine = Ranks(senders, world, keep_snapshot=async_training), HoldingEngine()
        weights = publisher_of(ranks, engine, senders, async_training=async_training)
        for version in range(3):
            await weights.publish(version)
            assert_holds(engine, ranks.tensors)
            ranks.tensors = dict(make_tensors(version + 1))
        await weights.close()

    asyncio.run(asyncio.wait_for(publish(), 60))


def test_an_engine_that_dies_while_ranks_send_is_restarted_and_gets_all_of_it() -> None:
    async def publish() -> None:
        ranks, engine = Ranks((0, 1), 2), HoldingEngine()
        weights = publisher_of(ranks, engine, (0, 1))
        await weights.publish(0)
        engine.dies = True
        await weights.publish(1)
        assert_holds(engine, ranks.tensors)
        await weights.close()

    started = time.monotonic()
    asyncio.run(asyncio.wait_for(publish(), 60))
    assert time.monotonic() - started < 15


def test_a_restarted_engine_gets_the_last_publish_from_the_copies_of_all_senders() -> None:
    async def publish() -> None:
        ranks, engine = Ranks((0, 1), 3, keep_snapshot=True), HoldingEngine()
        weights = publisher_of(ranks, engine, (0, 1), async_training=True)
        await weights.publish(0)
        published, ranks.tensors = ranks.tensors, dict(make_tensors(7))
        engine.alive, engine.tensors = False, {}
        await weights.restart_engine(engine)  # type: ignore[arg-type]
        assert_holds(engine, published)
        await weights.close()

    asyncio.run(asyncio.wait_for(publish(), 60))


def test_a_tensor_that_no_rank_says_it_sent_ends_the_run() -> None:
    async def publish() -> None:
        ranks, engine = Ranks((0, 1), 2), HoldingEngine()
        ranks.loses = "layers.3.weight"
        weights = publisher_of(ranks, engine, (0, 1))
        try:
            await weights.publish(0)
        finally:
            await weights.close()

    with pytest.raises(VerificationFailed, match=r"no rank has sent layers\.3\.weight"):
        asyncio.run(asyncio.wait_for(publish(), 60))
