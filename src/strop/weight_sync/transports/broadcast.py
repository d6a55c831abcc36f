"""Weight transport by collective broadcast (gloo or NCCL), to generators that may be on other machines.

The sender is rank 0 of a separate process group. The default group is not used: in a receiver's process it belongs to the engine.
Tensors are packed into buckets; one bucket is packed or unpacked while another one is transferred. A key-value store alongside
the group records which receivers have joined, when a publish begins, and why it failed; clients need the sender's secret, which
is part of its address. A broken group cannot be repaired: after a TransportError, create a new sender.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor

from strop.weight_sync.base import Manifest, NamedTensors, TransportError
from strop.weight_sync.transports.choose import SenderFactory, SenderSetup, uses_nccl
from strop.weight_sync.transports.connection import is_process_alive, machine_id
from strop.weight_sync.transports.manifest import (
    Bucket,
    align_up,
    manifest_digest,
    match_tensors,
    split_into_buckets,
    view_in_bucket,
)
from strop.weight_sync.transports.secret_store import SecretStore, SecretStoreServer, make_secret

dist: Any = torch.distributed  # the functions used here are untyped
CollectiveBackend = Literal["gloo", "nccl"]
BUCKET_SIZE = 64 << 20
TIMEOUT = 120.0
_POLL_SECONDS = 0.005  # seconds between polls of the store
_LIVENESS_SECONDS = 0.5  # seconds between liveness checks of processes on this machine
_STORE_TIMEOUT = timedelta(seconds=10)  # timeout of one store operation


@dataclass(frozen=True)
class BroadcastAddress:
    """Address and secret of the sender's store, and settings of the process group. Anyone with it can receive the weights."""

    backend: CollectiveBackend
    host: str
    port: int
    receivers: int
    bucket_size: int  # bytes
    timeout: float  # seconds
    secret: bytes = field(default=b"", repr=False)

    def connect(self, index: int, device: torch.device) -> BroadcastReceiver:
        """Raises TransportError if there is no sender, ValueError if ``index`` is out of range."""
        if not 0 <= index < self.receivers:
            raise ValueError(
                f"receiver {index} of {self.receivers}: indices start at 0; create the sender with the number of receivers"
            )
        return BroadcastReceiver(self, index, device)


class _BroadcastGroup:
    """One rank of the transfer: the store, the process group once all ranks are ready, and two buffers."""

    def __init__(self, address: BroadcastAddress, rank: int, store: Any, device: torch.device) -> None:
        self.address, self.rank, self.store, self.device = address, rank, store, device
        self.group: Any = None
        self.broken = ""
        self._buffers: list[Tensor] = []

    def form_group(self) -> None:
        """Create the process group. A collective: all ranks call it at the same time."""
        if self.group is None:
            make_group = {"gloo": _gloo_group, "nccl": _nccl_group}[self.address.backend]
            self.group = make_group(dist.PrefixStore("group", self.store), self.rank, self.address)

    def buffers(self, buckets: tuple[Bucket, ...]) -> list[Tensor]:
        """Return two buffers for alternating buckets, each [bytes of the largest bucket] uint8."""
        size = max((bucket.nbytes for bucket in buckets), default=0)
        if not self._buffers or self._buffers[0].numel() < size:
            self._buffers = []
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        return self._buffers

    def start_broadcast(self, memory: Tensor) -> Callable[[], object]:
        """Start to broadcast ``memory`` from rank 0. Return a function that waits for it."""
        if not memory.numel():
            return lambda: None
        wait: Callable[[], object] = self.group.broadcast(memory, 0).wait
        return wait

    def wait_for_keys(self, keys: list[str], failure: str) -> list[str]:
        """Wait for ``keys`` and return those still missing at the timeout. Raises TransportError if the key ``failure`` is set."""
        deadline = time.monotonic() + self.address.timeout
        next_check = time.monotonic() + _LIVENESS_SECONDS
        while missing := [key for key in keys if not self.store.check([key])]:
            if self.broken:
                raise TransportError(self.broken)
            if self.store.check([failure]):
                raise TransportError(self._find_dead_receiver(_LIVENESS_SECONDS) or self.store.get(failure).decode())
            if time.monotonic() >= next_check:
                next_check = time.monotonic() + _LIVENESS_SECONDS
                if dead := self._find_dead_receiver():
                    raise TransportError(dead)
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_SECONDS)
        return missing

    def _find_dead_receiver(self, patience: float = 0.0) -> str:
        """Describe a receiver on this machine whose process has exited, or return "" after ``patience`` seconds.

        A process exits shortly after its connections close, so callers that saw one close should allow some patience.
        """
        deadline = time.monotonic() + patience
        while True:
            for index in range(self.address.receivers):
                if self.store.check([f"joined/{index}"]):
                    host, pid = self.store.get(f"joined/{index}").decode().rsplit(" ", 1)
                    if host == machine_id() and not is_process_alive(int(pid)):
                        return f"receiver {index} (process {pid}) went away"
            if time.monotonic() >= deadline:
                return ""
            time.sleep(_POLL_SECONDS)

    @contextmanager
    def guard_publish(self, number: int) -> Iterator[None]:
        """Report an error raised inside to the other ranks, and close the channel."""
        if self.broken:
            raise TransportError(
                f"this channel broke before ({self.broken}): create a new sender and connect the receivers to it"
            )
        try:
            yield
        except BaseException as error:
            if self.broken:  # by a thread that closed the channel in the meantime
                raise TransportError(f"publish {number} ended early: {self.broken}") from error
            self._fail(number, error)
            if isinstance(error, RuntimeError) and not isinstance(error, TransportError):  # of torch.distributed
                raise TransportError(self._explain_failure(number, error)) from error
            raise

    def _fail(self, number: int, error: BaseException) -> None:
        who = f"receiver {self.rank - 1}" if self.rank else "the sender"
        what = "its reader stopped" if isinstance(error, GeneratorExit) else f"{type(error).__name__}: {error}"
        self.broken = f"{who}: {what}".splitlines()[0]
        with suppress(RuntimeError):
            if not self.store.check([_failure_key(number)]):
                self.store.set(_failure_key(number), self.broken)
        self.abort_group()

    def _explain_failure(self, number: int, error: BaseException) -> str:
        """Describe the cause of an error, as far as the store and the processes of this machine show it."""
        cause = str(error).splitlines()[0]
        try:
            if dead := self._find_dead_receiver(_LIVENESS_SECONDS):
                return f"{dead}: {cause}"
            reported = self.store.get(_failure_key(number)).decode() if self.store.check([_failure_key(number)]) else ""
        except RuntimeError:
            return f"the sender went away: it closed the channel, exited or was killed ({cause})"
        return f"publish {number} ended early: {reported or cause}"

    def abort_group(self) -> None:
        """Abort the process group, which makes pending operations of the other ranks fail."""
        group, self.group = self.group, None
        self._buffers = []
        if group is not None:
            with suppress(RuntimeError):
                group.abort()


class BroadcastSender:
    """``host`` is this machine's address as seen by receivers; ``device`` is where buckets are packed: a GPU with NCCL, else the CPU."""

    def __init__(
        self,
        receivers: int,
        *,
        backend: CollectiveBackend = "gloo",
        host: str = "127.0.0.1",
        port: int = 0,
        device: torch.device | None = None,
        bucket_size: int = BUCKET_SIZE,
        timeout: float = TIMEOUT,
    ) -> None:
        if receivers < 1:
            raise ValueError(f"found {receivers} receivers; a sender needs at least one")
        device = device or torch.device("cuda" if backend == "nccl" else "cpu")
        if (device.type == "cuda") != (backend == "nccl"):
            raise ValueError(f"{backend} does not broadcast from {device}: set device to the CPU for gloo, to a GPU for nccl")
        self.receivers = receivers
        secret = make_secret()
        self._server = SecretStoreServer(host, port, secret)
        store = SecretStore(host, self._server.port, secret, _STORE_TIMEOUT)
        self._address = BroadcastAddress(backend, host, self._server.port, receivers, align_up(bucket_size), timeout, secret)
        self._channel = _BroadcastGroup(self._address, 0, store, device)
        self._number = 0
        self._busy = threading.Lock()  # held during a publish and while closing

    @property
    def address(self) -> BroadcastAddress:
        return self._address

    @torch.no_grad()
    def send(self, manifest: Manifest, tensors: NamedTensors) -> None:
        self._number += 1
        with self._busy, self._channel.guard_publish(self._number):
            self._wait_for_receivers("ready", "begin to receive")
            self._check_digests(manifest_digest(manifest))
            self._channel.store.set(f"begin/{self._number}", "")
            self._channel.form_group()
            self._send(split_into_buckets(manifest, self._address.bucket_size), manifest, tensors)
            self._wait_for_receivers("taken", "read the last bucket")

    def _wait_for_receivers(self, event: str, doing: str) -> None:
        keys = [f"{event}/{self._number}/{index}" for index in range(self.receivers)]
        if missing := self._channel.wait_for_keys(keys, _failure_key(self._number)):
            names = ", ".join(key.rpartition("/")[2] for key in missing)
            raise TransportError(f"receiver {names} of {self.receivers} did not {doing} within {self._address.timeout:g} s")

    def _check_digests(self, expected: str) -> None:
        for index in range(self.receivers):
            if self._channel.store.get(f"ready/{self._number}/{index}").decode() != expected:
                raise TransportError(f"receiver {index}: its manifest is not the sender's: pass the same manifest on both sides")

    def _send(self, buckets: tuple[Bucket, ...], manifest: Manifest, tensors: NamedTensors) -> None:
        channel, matched, pending = self._channel, match_tensors(manifest, tensors), deque[Callable[[], object]]()
        memory = channel.buffers(buckets)
        for number, bucket in enumerate(buckets):
            if len(pending) == 2:  # wait until this buffer's previous bucket is sent
                pending.popleft()()
            for item in bucket.tensors:
                view_in_bucket(memory[number % 2], item).copy_(next(matched)[1].detach())
            pending.append(channel.start_broadcast(memory[number % 2][: bucket.nbytes]))
        next(matched, None)  # raises if there are more tensors than in the manifest
        for wait in pending:
            wait()

    def close(self) -> None:
        """Close from any thread. A publish in progress in another thread fails first, with a TransportError."""
        self._channel.broken = self._channel.broken or "it was closed"
        self._channel.abort_group()
        with self._busy:
            self._channel.abort_group()
            self._channel.store.close()
            self._server.close()


class BroadcastReceiver:
    """Receives as rank ``index`` + 1. The tensors it yields may be views of its buffers."""

    def __init__(self, address: BroadcastAddress, index: int, device: torch.device) -> None:
        self.index, self.device = index, device
        limit = timedelta(seconds=max(1.0, min(address.timeout, 30.0)))
        try:
            store = SecretStore(address.host, address.port, address.secret, limit)
            store.set(f"joined/{index}", f"{machine_id()} {os.getpid()}")
        except RuntimeError as error:
            raise TransportError(f"there is no sender at {address.host}:{address.port}: {str(error).splitlines()[0]}") from None
        buffer_device = device if address.backend == "nccl" else torch.device("cpu")
        self._channel = _BroadcastGroup(replace(address), index + 1, store, buffer_device)
        self._number = 0

    def receive(self, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
        self._number += 1
        channel = self._channel
        with channel.guard_publish(self._number):
            channel.store.set(f"ready/{self._number}/{self.index}", manifest_digest(manifest))
            if channel.wait_for_keys([f"begin/{self._number}"], _failure_key(self._number)):
                raise TransportError(f"the sender did not begin to send within {channel.address.timeout:g} s")
            channel.form_group()
            yield from self._receive(split_into_buckets(manifest, channel.address.bucket_size))
            channel.store.set(f"taken/{self._number}/{self.index}", "")

    def _receive(self, buckets: tuple[Bucket, ...]) -> Iterator[tuple[str, Tensor]]:
        channel = self._channel
        memory = channel.buffers(buckets)
        pending = deque(channel.start_broadcast(memory[number % 2][: bucket.nbytes]) for number, bucket in enumerate(buckets[:2]))
        for number, bucket in enumerate(buckets):
            pending.popleft()()
            for item in bucket.tensors:
                yield item.entry.name, view_in_bucket(memory[number % 2], item).to(self.device)
            if number + 2 < len(buckets):
                pending.append(channel.start_broadcast(memory[number % 2][: buckets[number + 2].nbytes]))

    def close(self) -> None:
        self._channel.broken = self._channel.broken or "it was closed"
        self._channel.abort_group()
        self._channel.store.close()


def _failure_key(number: int) -> str:
    return f"failed/{number}"


def _gloo_group(store: Any, rank: int, address: BroadcastAddress) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=address.timeout)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_local_address(address))]
    return dist.ProcessGroupGloo(store, rank, address.receivers + 1, options)


def _nccl_group(store: Any, rank: int, address: BroadcastAddress) -> Any:
    """Create an NCCL group with blocking waits that raise. NCCL's watchdog and monitor would abort the process, a receiver's engine."""
    settings = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    saved = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=address.timeout)
        return dist.ProcessGroupNCCL(store, rank, address.receivers + 1, options)
    finally:
        for name, value in saved.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _local_address(address: BroadcastAddress) -> str:
    """Return the address of this machine's interface that reaches the sender."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address.host, address.port))  # sends nothing
        return str(probe.getsockname()[0])


def make_senders(setup: SenderSetup) -> SenderFactory:
    backend: CollectiveBackend = "nccl" if uses_nccl(setup.device, setup.engines) else "gloo"
    return lambda receivers: BroadcastSender(
        receivers,
        backend=backend,
        device=setup.device if backend == "nccl" else torch.device("cpu"),
        host=setup.engines.host,
        timeout=setup.config.timeout_seconds,
        **setup.bucket,
    )
