"""Helpers of the weight transport tests: tensors of many kinds, and receivers and senders in other processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor

from strop.weight_sync.base import ChannelAddress, Manifest, Sender, TransportError
from strop.weight_sync.fingerprints import fingerprint
from strop.weight_sync.transports.manifest import build_manifest
from support.forks import forks

CPU = torch.device("cpu")


def make_tensors(seed: int, size: int = 300) -> list[tuple[str, Tensor]]:
    """Build tensors like a learner's: mostly float32, one larger than a small bucket, views, empty and scalar ones, integers."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    fused = normal(3 * 40, size)
    layers = [(f"layers.{i}.weight", normal(size + i, 64)) for i in range(20)]
    return [
        ("embed", normal(4 * size, 128)),
        ("q", fused[:40]),
        ("k", fused[40:80]),
        ("turned", normal(64, size).t()),
        ("counts", torch.randint(-9, 9, (17,), generator=generator)),
        ("scale", normal()),
        ("empty", normal(0, 5)),
        ("half", normal(33, 7).half()),
        *layers,
    ]


def expected_fingerprints(tensors: list[tuple[str, Tensor]], manifest: Manifest) -> dict[str, int]:
    """Return the fingerprints of the tensors that must arrive."""
    return {name: fingerprint(tensor.to(entry.dtype)) for (name, tensor), entry in zip(tensors, manifest.entries, strict=True)}


@dataclass(frozen=True)
class Failure:
    """A failed receive: its message and duration."""

    text: str
    seconds: float


def in_thread(function: Callable[..., object], *arguments: object) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(function(*arguments)), daemon=True)
    thread.start()
    return thread, found


def receive_fingerprints(receiver: Any, manifest: Manifest) -> dict[str, int] | Failure:
    """Receive one publish. Returns the fingerprints, or the failure."""
    started = time.monotonic()
    try:
        return {name: fingerprint(tensor) for name, tensor in receiver.receive(manifest)}
    except TransportError as error:
        return Failure(str(error), time.monotonic() - started)


def receive_on_demand(pipe: Connection, address: ChannelAddress, index: int, pause: float = 0.0) -> None:
    """Receive one publish per manifest from ``pipe`` and reply with the result. Sleeps ``pause`` seconds after each tensor."""
    receiver = address.connect(index, CPU)
    pipe.send("connected")
    while (manifest := pipe.recv()) is not None:
        if pause:
            slow = receiver.receive(manifest)
            for count, _ in enumerate(slow):
                if count == 2:
                    pipe.send("reading")
                time.sleep(pause)
        else:
            pipe.send(receive_fingerprints(receiver, manifest))
    receiver.close()


def send_once(pipe: Connection, make: Callable[[], Sender], manifest: Manifest, seed: int, stop_at: str) -> None:
    """Send once from a separate process. Reports when it reaches the tensor ``stop_at`` and hangs there."""
    sender = make()
    pipe.send(sender.address)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in make_tensors(seed):
            if name == stop_at:
                pipe.send("stopped")
                time.sleep(1000)
            yield name, tensor

    sender.send(manifest, tensors())
    pipe.send("sent")
    pipe.recv()
    sender.close()


@dataclass(frozen=True)
class ChildProcess:
    process: BaseProcess
    pipe: Connection

    def answer(self, seconds: float = 60.0) -> Any:
        assert self.pipe.poll(seconds), f"no answer in {seconds} s"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(20)


@contextmanager
def spawn_child(body: Callable[..., None], *arguments: Any, fresh: bool = False) -> Iterator[ChildProcess]:
    """Run ``body(pipe, *arguments)`` in its own process, which is killed at the end if it is still alive.

    ``fresh``: in a new interpreter, for what cannot use a GPU as a fork: the server of the forks may have imported a library that counted
    the GPUs (torchao does).
    """
    ours, theirs = multiprocessing.Pipe()
    context: Any = multiprocessing.get_context("spawn") if fresh else forks()
    process = context.Process(target=body, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ChildProcess(process, ours)
        with suppress(OSError):
            ours.send(None)
        process.join(20)
    finally:
        if process.is_alive():
            process.kill()
            process.join(20)


def make_manifest(dtype: torch.dtype | None = torch.bfloat16) -> Manifest:
    return build_manifest(make_tensors(0), dtype)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
