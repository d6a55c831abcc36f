"""Weights by gloo broadcast between real processes on the loopback interface; and what happens when one of them dies."""

from __future__ import annotations

import functools
import os
import threading
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from strop.weight_sync.base import TransportError
from strop.weight_sync.transports.broadcast import BroadcastAddress, BroadcastSender, _nccl_group
from support.transports import (
    CPU,
    Failure,
    expected_fingerprints,
    make_manifest,
    make_tensors,
    receive_fingerprints,
    receive_on_demand,
    send_once,
    spawn_child,
)

SMALL = 64 << 10


def receive_beside_another_group(pipe: Connection, address: BroadcastAddress, index: int, path: str) -> None:
    """As in an engine's process, whose default group is its own."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    receiver = address.connect(index, CPU)
    pipe.send("connected")
    while (manifest := pipe.recv()) is not None:
        pipe.send(receive_fingerprints(receiver, manifest))
        number = torch.tensor([index])
        dist.all_reduce(number)
        assert number.item() == index
    receiver.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_receivers_get_every_publish_bit_for_bit_beside_groups_of_their_own(dtype: torch.dtype | None, tmp_path: Path) -> None:
    sender = BroadcastSender(2, bucket_size=SMALL, timeout=60)
    manifest = make_manifest(dtype)
    with ExitStack() as stack:
        children = [
            stack.enter_context(spawn_child(receive_beside_another_group, sender.address, index, str(tmp_path / str(index))))
            for index in range(2)
        ]
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


def test_a_sender_that_was_killed_is_noticed_and_a_new_one_works() -> None:
    make = functools.partial(BroadcastSender, 2, bucket_size=SMALL, timeout=30.0)
    manifest = make_manifest()
    with ExitStack() as stack:
        for seed, stop in ((1, "layers.9.weight"), (2, "")):
            first = stack.enter_context(spawn_child(send_once, make, manifest, seed, stop))
            address = first.answer()
            children = [stack.enter_context(spawn_child(receive_on_demand, address, index)) for index in range(2)]
            for each in children:
                assert each.answer() == "connected"
                each.pipe.send(manifest)
            if stop:
                assert first.answer() == "stopped"
                first.kill()
            for each in children:
                found = each.answer(20)
                if stop:
                    assert isinstance(found, Failure)
                    assert "went away" in found.text
                else:
                    assert found == expected_fingerprints(make_tensors(seed), manifest)


def test_a_receiver_that_was_killed_is_named() -> None:
    sender = BroadcastSender(2, bucket_size=SMALL, timeout=30.0)
    manifest = make_manifest()
    with (
        spawn_child(receive_on_demand, sender.address, 0, 0.05) as slow,
        spawn_child(receive_on_demand, sender.address, 1) as other,
    ):
        for each in (slow, other):
            assert each.answer() == "connected"
            each.pipe.send(manifest)
        killer = threading.Thread(target=lambda: (slow.answer(), slow.kill()))
        killer.start()
        started = time.monotonic()
        with pytest.raises(TransportError, match=rf"receiver 0 \(process {slow.process.pid}\) went away"):
            sender.send(manifest, make_tensors(1))
        killer.join(20)
        assert time.monotonic() - started < 20
        assert isinstance(other.answer(40), Failure)
    with pytest.raises(TransportError, match="this channel broke before"):
        sender.send(manifest, make_tensors(1))
    sender.close()


def test_a_learner_that_fails_ends_the_publish_at_once_and_says_why() -> None:
    sender = BroadcastSender(1, bucket_size=SMALL, timeout=30.0)
    manifest = make_manifest()
    with spawn_child(receive_on_demand, sender.address, 0) as other:
        assert other.answer() == "connected"
        other.pipe.send(manifest)
        with pytest.raises(ValueError, match="but nothing arrived"):
            sender.send(manifest, make_tensors(1)[:12])
        failure = other.answer(20)
        assert isinstance(failure, Failure)
        assert "but nothing arrived" in failure.text
        assert failure.seconds < 15
    sender.close()


def test_other_manifests_are_refused_on_both_sides() -> None:
    sender = BroadcastSender(1, timeout=20)
    receiver = sender.address.connect(0, CPU)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(receive_fingerprints(receiver, make_manifest(None))))
    thread.start()
    with pytest.raises(TransportError, match="receiver 0: its manifest is not the sender's"):
        sender.send(make_manifest(), make_tensors(1))
    thread.join(20)
    assert isinstance(found[0], Failure)
    assert "its manifest is not the sender's" in found[0].text
    sender.close()
    receiver.close()


def test_who_does_not_come_in_time_is_named() -> None:
    sender = BroadcastSender(2, timeout=0.3)
    with pytest.raises(TransportError, match=r"receiver 0, 1 of 2 did not begin to receive within 0.3 s"):
        sender.send(make_manifest(), make_tensors(0))
    sender.close()
    sender = BroadcastSender(1, timeout=0.3)
    receiver = sender.address.connect(0, CPU)
    with pytest.raises(TransportError, match=r"the sender did not begin to send within 0.3 s"):
        list(receiver.receive(make_manifest()))
    sender.close()


def test_there_has_to_be_a_sender() -> None:
    address = BroadcastAddress("gloo", "127.0.0.1", 1, 1, 1 << 20, 1.0)
    with pytest.raises(TransportError, match="there is no sender"):
        address.connect(0, CPU)
    with pytest.raises(ValueError, match="receiver 1 of 1"):
        address.connect(1, CPU)


def test_channels_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="found 0 receivers"):
        BroadcastSender(0)
    with pytest.raises(ValueError, match="gloo does not broadcast from cuda"):
        BroadcastSender(1, device=torch.device("cuda"))
    with pytest.raises(ValueError, match="nccl does not broadcast from cpu"):
        BroadcastSender(1, backend="nccl", device=CPU)


def test_the_environment_stays_as_it_was_when_nccl_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    with pytest.raises(AttributeError):
        _nccl_group(None, 0, BroadcastAddress("nccl", "127.0.0.1", 1, 1, 1, 1.0))
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
