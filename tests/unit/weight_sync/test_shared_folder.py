"""Weights through a folder: whole or not at all, and nothing stays behind."""

from __future__ import annotations

import functools
import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.weight_sync.base import TransportError
from strop.weight_sync.transports import shared_folder
from strop.weight_sync.transports.shared_folder import FolderSender
from support.transports import (
    CPU,
    Failure,
    expected_fingerprints,
    in_thread,
    make_manifest,
    make_tensors,
    receive_fingerprints,
    receive_on_demand,
    send_once,
    spawn_child,
)

SMALL = 64 << 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_several_receivers_get_every_publish_bit_for_bit(dtype: torch.dtype | None, tmp_path: Path) -> None:
    sender = FolderSender(tmp_path / "sync", 2, file_size=SMALL, timeout=60)
    manifest = make_manifest(dtype)
    receivers = [sender.address.connect(index, CPU) for index in range(2)]
    for seed in range(3):
        tensors = make_tensors(seed)
        runs = [in_thread(receive_fingerprints, receiver, manifest) for receiver in receivers]
        sender.send(manifest, tensors)
        for thread, found in runs:
            thread.join(20)
            assert found == [expected_fingerprints(tensors, manifest)]
        assert [path.name for path in sender.channel.iterdir()] == ["owner.json"]
    sender.close()
    assert list((tmp_path / "sync").iterdir()) == []


def test_others_cannot_read_or_change_the_weights(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    before = os.umask(0)
    try:
        sender = FolderSender(tmp_path, 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(sender.channel.stat().st_mode) == 0o700
    sender.close()


def test_a_sender_that_was_killed_is_noticed_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    make = functools.partial(FolderSender, tmp_path, 1, file_size=SMALL, timeout=30.0)
    manifest = make_manifest()
    with ExitStack() as stack:
        first = stack.enter_context(spawn_child(send_once, make, manifest, 1, "layers.9.weight"))
        receiver = stack.enter_context(spawn_child(receive_on_demand, first.answer(), 0))
        assert receiver.answer() == "connected"
        receiver.pipe.send(manifest)
        assert first.answer() == "stopped"
        first.kill()
        failure = receiver.answer(20)
        assert isinstance(failure, Failure)
        assert "went away" in failure.text
        (left,) = tmp_path.iterdir()
        second = make()
        assert not left.exists()
        thread, found = in_thread(receive_fingerprints, second.address.connect(0, CPU), manifest)
        second.send(manifest, make_tensors(2))
        thread.join(20)
        assert found == [expected_fingerprints(make_tensors(2), manifest)]


def test_the_folder_of_a_sender_elsewhere_is_left_alone(tmp_path: Path) -> None:
    other = FolderSender(tmp_path, 1)
    (other.channel / "owner.json").write_text(json.dumps({"machine": "elsewhere", "process": 1}))
    FolderSender(tmp_path, 1)
    assert other.channel.exists()


def test_a_publish_that_was_given_up_is_not_taken_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = FolderSender(tmp_path, 1, file_size=SMALL, timeout=20)
    manifest = make_manifest()
    receiver = sender.address.connect(0, CPU)
    list_failures, waiting = receiver._list_failures, threading.Event()

    def list_failures_and_say_so() -> set[int]:
        failures = list_failures()
        waiting.set()  # from here on a failure is a new one
        return failures

    monkeypatch.setattr(receiver, "_list_failures", list_failures_and_say_so)

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from make_tensors(1)[:12]
        assert waiting.wait(20)
        raise ArithmeticError("the learner broke")

    thread, found = in_thread(receive_fingerprints, receiver, manifest)
    with pytest.raises(ArithmeticError):
        sender.send(manifest, failing())
    thread.join(20)
    assert isinstance(found[0], Failure)
    assert "aborted publish 1: ArithmeticError: the learner broke" in found[0].text
    thread, found = in_thread(receive_fingerprints, receiver, manifest)
    sender.send(manifest, make_tensors(3))
    thread.join(20)
    assert found == [expected_fingerprints(make_tensors(3), manifest)]


def test_who_does_not_come_in_time_is_named(tmp_path: Path) -> None:
    sender = FolderSender(tmp_path, 2, timeout=0.2)
    with pytest.raises(TransportError, match=r"receiver 0, 1 of 2 did not read .* within 0.2 s"):
        sender.send(make_manifest(), make_tensors(0))
    receiver = sender.address.connect(1, CPU)
    with pytest.raises(TransportError, match=r"did not publish anything within 0\.2 s"):
        list(receiver.receive(make_manifest()))
    sender.close()
    with pytest.raises(TransportError, match="went away"):
        list(receiver.receive(make_manifest()))
    with pytest.raises(TransportError, match="no sender's folder"):
        sender.address.connect(0, CPU)


def test_other_manifests_and_indexes_are_refused(tmp_path: Path) -> None:
    sender = FolderSender(tmp_path, 1, timeout=20)
    receiver = sender.address.connect(0, CPU)
    thread, found = in_thread(receive_fingerprints, receiver, make_manifest(None))
    with pytest.raises(TransportError, match="receiver 0: its manifest is not that of"):
        sender.send(make_manifest(), make_tensors(1))
    thread.join(20)
    assert isinstance(found[0], Failure)
    assert "its manifest is not that of" in found[0].text
    thread, found = in_thread(next, receiver.receive(make_manifest()))
    with pytest.raises(TransportError, match="receiver 0: its reader stopped"):
        sender.send(make_manifest(), make_tensors(1))
    thread.join(20)
    thread, found = in_thread(receive_fingerprints, receiver, make_manifest())
    sender.send(make_manifest(), make_tensors(2))
    thread.join(20)
    assert found == [expected_fingerprints(make_tensors(2), make_manifest())]
    with pytest.raises(ValueError, match="receiver 1 of 1"):
        sender.address.connect(1, CPU)
    with pytest.raises(ValueError, match="found 0 receivers"):
        FolderSender(tmp_path, 0)


def test_a_file_that_is_not_whole_is_no_publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = FolderSender(tmp_path, 1, timeout=20)
    written = shared_folder._write_file

    def cut_short(path: Path, *arguments: Any) -> None:
        written(path, *arguments)
        path.write_bytes(path.read_bytes()[:-100])

    monkeypatch.setattr(shared_folder, "_write_file", cut_short)
    thread, found = in_thread(receive_fingerprints, sender.address.connect(0, CPU), make_manifest())
    with pytest.raises(TransportError, match=r"receiver 0: .* cannot be read"):
        sender.send(make_manifest(), make_tensors(1))
    thread.join(20)
    assert isinstance(found[0], Failure)
