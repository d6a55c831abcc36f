"""Weights through shared memory, between real processes; and what happens when one of them dies."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Client, Connection
from pathlib import Path

import pytest
import torch

from strop.weight_sync.base import Manifest, Receiver, TransportError
from strop.weight_sync.transports.host_memory import MemoryReceiver, MemorySender
from strop.weight_sync.transports.manifest import build_manifest
from strop.weight_sync.transports.shared_buffer import SharedBufferAddress
from support.transports import (
    CPU,
    Failure,
    expected_fingerprints,
    in_thread,
    make_manifest,
    make_tensors,
    open_files,
    receive_fingerprints,
    receive_on_demand,
    send_once,
    spawn_child,
)

SMALL = 64 << 10  # bytes of a bucket: many of them, and tensors larger than one


@pytest.fixture
def sender() -> Iterator[MemorySender]:
    sender = MemorySender(1, bucket_size=SMALL, slots=3, timeout=20)
    yield sender
    sender.close()


def assert_served(sender: MemorySender, receiver: Receiver, manifest: Manifest, tensors: list[tuple[str, torch.Tensor]]) -> None:
    thread, found = in_thread(receive_fingerprints, receiver, manifest)
    sender.send(manifest, tensors)
    thread.join(20)
    assert found == [expected_fingerprints(tensors, manifest)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_several_receivers_get_every_publish_bit_for_bit(dtype: torch.dtype | None) -> None:
    sender = MemorySender(2, bucket_size=SMALL, slots=3, timeout=60)
    manifest = make_manifest(dtype)
    with ExitStack() as stack:
        children = [stack.enter_context(spawn_child(receive_on_demand, sender.address, index)) for index in range(2)]
        for seed in range(3):
            tensors = make_tensors(seed)
            for each in children:
                each.pipe.send(manifest)
            sender.send(manifest, tensors)
            for each in children:
                if seed == 0:
                    assert each.answer() == "connected"
                assert each.answer() == expected_fingerprints(tensors, manifest)
    assert [each.process.exitcode for each in children] == [0, 0]
    sender.close()


def test_receivers_read_where_the_sender_wrote(sender: MemorySender) -> None:
    """Zero copies: what is written into a yielded tensor is in the sender's memory."""
    tensors = [("a", torch.ones(4))]
    manifest = build_manifest(tensors, None)
    receiver = sender.address.connect(0, CPU)
    thread, _ = in_thread(sender.send, manifest, tensors)
    for _, tensor in receiver.receive(manifest):
        tensor[0] = 7
    thread.join(20)
    assert sender._memory is not None
    assert sender._memory.view(torch.float32)[:4].tolist() == [7, 1, 1, 1]


def test_a_model_smaller_than_the_ring_has_no_larger_segment(sender: MemorySender) -> None:
    for tensors in ([("a", torch.ones(40))], [("a", torch.ones(40)), ("b", torch.ones(SMALL))]):  # and it grows when it has to
        manifest = build_manifest(tensors, None)
        assert_served(sender, sender.address.connect(0, CPU), manifest, tensors)
        assert sender._memory is not None
        assert sender._memory.numel() == 256 * len(tensors) + (4 * SMALL - 256 if len(tensors) == 2 else 0)


def test_nothing_is_left_of_a_sender_that_was_killed_and_a_new_one_works() -> None:
    make = functools.partial(MemorySender, 2, bucket_size=SMALL, slots=2, timeout=30.0)
    manifest = make_manifest()
    before = set(os.listdir("/dev/shm"))
    with ExitStack() as stack:
        first = stack.enter_context(spawn_child(send_once, make, manifest, 1, "layers.9.weight"))
        address = first.answer()
        children = [stack.enter_context(spawn_child(receive_on_demand, address, index)) for index in range(2)]
        for each in children:
            assert each.answer() == "connected"
            each.pipe.send(manifest)
        assert first.answer() == "stopped"
        first.kill()
        for each in children:
            failure = each.answer(15)
            assert isinstance(failure, Failure)
            assert "the sender" in failure.text
            assert "went away" in failure.text
        assert set(os.listdir("/dev/shm")) <= before
        with pytest.raises(TransportError, match="no sender"):
            address.connect(0, CPU)
        second = stack.enter_context(spawn_child(send_once, make, manifest, 2, ""))
        address = second.answer()
        threads = [in_thread(receive_fingerprints, address.connect(index, CPU), manifest) for index in range(2)]
        assert second.answer() == "sent"
        for thread, found in threads:
            thread.join(20)
            assert found == [expected_fingerprints(make_tensors(2), manifest)]


def fork_and_hang(pipe: Connection, make: Callable[[], MemorySender], manifest: Manifest) -> None:
    """A sender with a fork that holds all its connections open: a data loader's worker, say."""
    sender = make()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        if (fork := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        pipe.send(fork)
        time.sleep(1000)
        yield from ()

    pipe.send(sender.address)
    sender.send(manifest, tensors())


def test_a_sender_that_was_killed_is_noticed_though_a_fork_of_it_lives() -> None:
    manifest = make_manifest()
    with spawn_child(fork_and_hang, functools.partial(MemorySender, 1, timeout=60.0), manifest) as sender:
        receiver = sender.answer().connect(0, CPU)
        thread, found = in_thread(receive_fingerprints, receiver, manifest)
        fork = sender.answer()
        sender.kill()
        thread.join(15)
        os.kill(fork, signal.SIGKILL)
        (failure,) = found
        assert isinstance(failure, Failure)
        assert "went away" in failure.text


def test_a_receiver_that_was_killed_is_named_and_its_successor_is_served() -> None:
    sender = MemorySender(1, bucket_size=SMALL, slots=2, timeout=30.0)
    manifest = make_manifest()
    with spawn_child(receive_on_demand, sender.address, 0, 0.05) as slow:
        assert slow.answer() == "connected"
        slow.pipe.send(manifest)
        killer, _ = in_thread(lambda: (slow.answer(), slow.kill()))
        started = time.monotonic()
        with pytest.raises(TransportError, match=rf"receiver 0 \(process {slow.process.pid}\) went away"):
            sender.send(manifest, make_tensors(1))
        killer.join(20)
        assert time.monotonic() - started < 15
    assert_served(sender, sender.address.connect(0, CPU), manifest, make_tensors(2))
    sender.close()


class BlindReceiver(MemoryReceiver):
    """Cannot open the sender's memory, as a process without the sender's GPU, or a fork of one that has used CUDA."""

    def _open_memory(self, handle: int) -> torch.Tensor:
        super()._open_memory(handle)
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")


def fail_and_stay(pipe: Connection, address: SharedBufferAddress) -> None:
    receiver = BlindReceiver(address, 0, CPU)
    manifest = pipe.recv()
    try:
        next(receiver.receive(manifest))
    except RuntimeError as error:
        pipe.send(str(error))
    pipe.recv()


def test_a_receiver_that_cannot_open_the_memory_ends_its_sender_at_once_with_its_reason(sender: MemorySender) -> None:
    manifest = make_manifest()
    with spawn_child(fail_and_stay, sender.address) as child:
        child.pipe.send(manifest)
        started = time.monotonic()
        with pytest.raises(TransportError, match="receiver 0: RuntimeError: Cannot re-initialize CUDA in forked subprocess"):
            sender.send(manifest, make_tensors(0))
        assert time.monotonic() - started < 10, "its time limit is 20 s"
        assert child.answer() == "Cannot re-initialize CUDA in forked subprocess"
    assert_served(sender, sender.address.connect(0, CPU), manifest, make_tensors(2))


def connect_and_wait(pipe: Connection, address: SharedBufferAddress, index: int) -> None:
    receiver = address.connect(index, CPU)
    pipe.send("connected")
    pipe.recv()
    receiver.close()


def test_a_receiver_that_dies_while_others_are_awaited_ends_its_sender_at_once() -> None:
    sender = MemorySender(2, bucket_size=SMALL, timeout=60)
    manifest = make_manifest()
    with spawn_child(connect_and_wait, sender.address, 0) as child:
        assert child.answer() == "connected"
        killer = threading.Timer(1.0, child.kill)
        started = time.monotonic()
        killer.start()
        with pytest.raises(TransportError, match=rf"receiver 0 \(process {child.process.pid}\) went away"):
            sender.send(manifest, make_tensors(0))
        assert time.monotonic() - started < 15
        killer.join()
    threads = [in_thread(receive_fingerprints, sender.address.connect(n, CPU), manifest) for n in range(2)]
    sender.send(manifest, make_tensors(1))
    for thread, found in threads:
        thread.join(20)
        assert found == [expected_fingerprints(make_tensors(1), manifest)]
    sender.close()


def test_who_does_not_come_in_time_is_named() -> None:
    sender = MemorySender(3, timeout=0.3)
    manifest = make_manifest()
    receivers = [sender.address.connect(1, CPU)]
    with pytest.raises(TransportError, match=r"receivers 0, 2 of 3 did not connect within 0.3 s"):
        sender.send(manifest, make_tensors(0))
    receivers += [sender.address.connect(index, CPU) for index in (0, 2)]
    with pytest.raises(TransportError, match=r"receivers 0, 1, 2 did not begin to receive within 0.3 s"):
        sender.send(manifest, make_tensors(0))
    assert len(receivers) == 3
    sender.close()


def test_who_connects_and_leaves_or_has_no_place_does_not_end_a_publish(sender: MemorySender) -> None:
    Client(sender.address.path, "AF_UNIX").close()
    beyond = Client(sender.address.path, "AF_UNIX")
    beyond.send(1)  # of one receiver
    receiver = sender.address.connect(0, CPU)
    assert_served(sender, receiver, make_manifest(), make_tensors(0))
    beyond.close()


def test_a_receiver_gives_up_when_nothing_comes() -> None:
    sender = MemorySender(1, timeout=0.3)
    receiver = sender.address.connect(0, CPU)
    with pytest.raises(TransportError, match=r"the sender .*did not begin to send within 0.3 s"):
        list(receiver.receive(make_manifest()))
    sender.close()
    with pytest.raises(TransportError, match="went away"):
        list(receiver.receive(make_manifest()))


def test_a_publish_that_was_given_up_is_not_taken_for_the_next(sender: MemorySender) -> None:
    manifest = make_manifest()
    receiver = sender.address.connect(0, CPU)

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from make_tensors(1)[:12]
        raise ArithmeticError("the learner broke")

    for _ in range(2):
        thread, found = in_thread(receive_fingerprints, receiver, manifest)
        with pytest.raises(ArithmeticError):
            sender.send(manifest, failing())
        thread.join(20)
        (failure,) = found
        assert isinstance(failure, Failure)
        assert "ArithmeticError: the learner broke" in failure.text
    sender.timeout = 0.2
    with pytest.raises(TransportError):
        sender.send(manifest, make_tensors(2))  # nobody receives: the receiver finds its beginning and its end later
    sender.timeout = 20
    assert_served(sender, receiver, manifest, make_tensors(3))


def test_a_reader_that_stops_ends_the_publish_and_not_the_channel(sender: MemorySender) -> None:
    manifest = make_manifest()
    receiver = sender.address.connect(0, CPU)

    def stop_early() -> str:
        reading = receiver.receive(manifest)
        name = next(reading)[0]
        reading.close()  # type: ignore[attr-defined]
        return name

    thread, found = in_thread(stop_early)
    with pytest.raises(TransportError, match="receiver 0: its reader stopped"):
        sender.send(manifest, make_tensors(1))
    thread.join(20)
    assert found == ["embed"]
    assert_served(sender, receiver, manifest, make_tensors(2))


def test_wrong_tensors_and_other_manifests_are_refused_on_both_sides(sender: MemorySender) -> None:
    manifest = make_manifest()
    receiver = sender.address.connect(0, CPU)
    thread, found = in_thread(receive_fingerprints, receiver, manifest)
    with pytest.raises(ValueError, match="comes next"):
        sender.send(manifest, make_tensors(1)[::-1])
    thread.join(20)
    assert isinstance(found[0], Failure)
    thread, found = in_thread(receive_fingerprints, receiver, make_manifest(None))
    with pytest.raises(TransportError, match="receiver 0: its manifest is not the sender's"):
        sender.send(manifest, make_tensors(1))
    thread.join(20)
    assert isinstance(found[0], Failure)


def test_channels_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="found 0 receivers"):
        MemorySender(0)
    with pytest.raises(ValueError, match="found slots=0"):
        MemorySender(1, slots=0)
    sender = MemorySender(2)
    with pytest.raises(ValueError, match="receiver 2 of 2"):
        sender.address.connect(2, CPU)
    sender.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_channel_leaves_no_open_files() -> None:
    before = open_files()
    for _ in range(3):
        sender = MemorySender(1, bucket_size=SMALL, timeout=20)
        receiver = sender.address.connect(0, CPU)
        assert_served(sender, receiver, make_manifest(), make_tensors(1))
        receiver.close()
        sender.close()
    assert open_files() <= before
