"""Transfer through a buffer in memory that sender and receivers share, the common part of the host-memory and CUDA IPC transports.

    sender                                 receiver
    PublishMessage(n, digest)     ------>
                                  <------  PublishMessage(n)             ready
    fills bucket 1
    PublishMessage(n, buckets=1)  ------>  yields its tensors, as views
    fills bucket 2 meanwhile
    PublishMessage(n, buckets=2)  ------>
                                  <------  PublishMessage(n, buckets=1)  its memory is free once all receivers sent this

Both sides compute the position of each bucket from the manifest. An error on one side reaches the other as a message with
``failure``, or as the end of the connection. The number n increases with each publish, so messages of an aborted one are never
mistaken for the current one's.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor

from strop.device_copies import is_gpu
from strop.weight_sync.base import Manifest, NamedTensors, TransportError
from strop.weight_sync.transports.connection import (
    POLL_SECONDS,
    PeerConnection,
    accept_receiver,
    close_listener,
    connect_to_sender,
    is_process_alive,
    listen,
    wait_for_peers,
)
from strop.weight_sync.transports.manifest import (
    Bucket,
    PlacedBucket,
    align_up,
    manifest_digest,
    match_tensors,
    place_buckets,
    split_into_buckets,
    view_in_bucket,
)


@dataclass(frozen=True)
class PublishMessage:
    """A message about one publish."""

    publish: int  # counts from 1
    buckets: int = 0  # number filled by the sender, or read by the receiver
    digest: str = ""  # digest of the manifest; the sender begins with it
    memory: Any = None  # how to open the shared memory; sent before the publish to receivers that do not have it yet
    failure: str = ""  # why this side has aborted the publish


@dataclass(frozen=True)
class SharedBufferAddress:
    """Address of a sender on this machine."""

    receiver_type: type[SharedBufferReceiver]
    path: str  # of the sender's Unix socket
    receivers: int
    bucket_size: int  # bytes
    timeout: float  # seconds

    def connect(self, index: int, device: torch.device) -> SharedBufferReceiver:
        """Raises TransportError if the sender is gone."""
        return self.receiver_type(self, index, device)


class SharedBufferSender(ABC):
    """``Sender`` over shared memory. Receivers may reconnect after a restart. Subclasses allocate the memory and share it."""

    receiver_type: type[SharedBufferReceiver]

    def __init__(self, receivers: int, *, bucket_size: int, slots: int, timeout: float) -> None:
        if receivers < 1:
            raise ValueError(f"found {receivers} receivers; a sender needs at least one")
        if slots < 1:
            raise ValueError(f"found slots={slots}; set at least one, or two so that both sides work at the same time")
        self.receivers, self.bucket_size, self.slots, self.timeout = receivers, align_up(bucket_size), slots, timeout
        self.publish = 0
        self._listener, self._path = listen(max(16, 2 * receivers))
        self._peers: dict[int, PeerConnection] = {}
        self._memory: Tensor | None = None  # flat uint8
        self._sharing: set[PeerConnection] = set()  # the receivers that have the memory
        self._buckets_read: dict[int, int] = {}  # receiver -> number of buckets of this publish it has read; -1: not ready yet
        self._busy = threading.Lock()  # held during a publish and while closing
        self._closed = False

    @property
    def address(self) -> SharedBufferAddress:
        return SharedBufferAddress(self.receiver_type, self._path, self.receivers, self.bucket_size, self.timeout)

    @abstractmethod
    def _allocate(self, size: int) -> Tensor:
        """Return memory to share, [size] uint8."""

    @abstractmethod
    def _send_memory(self, memory: Tensor, peer: PeerConnection) -> None:
        """Send a handle to the memory, and anything else the receiver needs to open it."""

    @torch.no_grad()
    def send(self, manifest: Manifest, tensors: NamedTensors) -> None:
        with self._busy:
            self.publish += 1
            try:
                self._connect_receivers()
                buckets = split_into_buckets(manifest, self.bucket_size)
                memory = self._share_memory(_buffer_capacity(buckets, self.bucket_size, self.slots), manifest_digest(manifest))
                self._fill(memory, buckets, match_tensors(manifest, tensors))
                self._wait_until_read(len(buckets))
            except BaseException as error:
                for peer in self._peers.values():
                    with suppress(TransportError):
                        peer.send(PublishMessage(self.publish, failure=f"{type(error).__name__}: {error}"))
                raise

    def _connect_receivers(self) -> None:
        """Wait until every receiver is connected. Raises a TransportError that names the missing ones, or one that dies meanwhile."""
        self._drop_lost_receivers()
        deadline = time.monotonic() + self.timeout
        while True:
            self._check_open()
            for peer in self._drop_lost_receivers():
                if not is_process_alive(peer.pid):  # otherwise it connects again
                    raise peer.make_lost_error()
            missing = [index for index in range(self.receivers) if index not in self._peers]
            remaining = max(0.0, deadline - time.monotonic())
            if wait([self._listener], min(POLL_SECONDS, remaining) if missing else 0.0):
                self._accept_receiver()
            elif not missing:
                return
            elif not remaining:
                names = _format_receivers(missing)
                raise TransportError(f"{names} of {self.receivers} did not connect within {self.timeout:g} s")

    def _drop_lost_receivers(self) -> list[PeerConnection]:
        lost = []
        for index, peer in list(self._peers.items()):
            try:
                while peer.has_message():
                    peer.read()  # about an earlier publish
            except TransportError:
                lost.append(self._peers.pop(index))
                peer.connection.close()
        return lost

    def _accept_receiver(self) -> None:
        accepted = accept_receiver(self._listener, self.timeout)
        if accepted is not None and accepted[0] in range(self.receivers):
            index, peer = accepted
            if (previous := self._peers.pop(index, None)) is not None:
                previous.connection.close()
            self._peers[index] = peer

    def _share_memory(self, capacity: int, digest: str) -> Tensor:
        """Begin a publish, and share ``capacity`` bytes with the receivers that do not have them yet. Returns when all are ready."""
        if self._memory is None or self._memory.numel() < capacity:
            self._memory, self._sharing = None, set()  # free the old memory before allocating more
            self._memory = self._allocate(capacity)
        for peer in self._peers.values():
            if peer not in self._sharing:
                self._send_memory(self._memory, peer)
            peer.send(PublishMessage(self.publish, digest=digest))
        self._sharing = set(self._peers.values())
        self._buckets_read = dict.fromkeys(range(self.receivers), -1)
        self._wait_until_read(0)
        return self._memory

    def _fill(self, memory: Tensor, buckets: Sequence[Bucket], tensors: Iterator[tuple[object, Tensor]]) -> None:
        for count, place in enumerate(place_buckets(buckets, memory.numel()), 1):
            self._wait_until_read(place.reads)
            self._fill_bucket(memory, place, tensors)
            for peer in self._peers.values():
                peer.send(PublishMessage(self.publish, count))
        next(tensors, None)  # raises if there are more tensors than in the manifest

    def _fill_bucket(self, memory: Tensor, place: PlacedBucket, tensors: Iterator[tuple[object, Tensor]]) -> None:
        streams: set[torch.Stream] = set()
        for item in place.bucket.tensors:
            tensor = next(tensors)[1].detach()
            view_in_bucket(memory, item, place.start).copy_(tensor, non_blocking=True)  # casts and copies in one operation
            streams.update(_current_streams(tensor.device, memory.device))
        for stream in streams:
            stream.synchronize()

    def _wait_until_read(self, count: int) -> None:
        """Wait until every receiver has read ``count`` buckets. Raises TransportError if one is gone, aborted the publish or is late."""
        while late := [index for index, read in self._buckets_read.items() if read < count]:
            action = f"read bucket {count}" if count else "begin to receive"
            message = f"{_format_receivers(late)} did not {action} within {self.timeout:g} s"
            arrived = wait_for_peers([self._peers[index] for index in late], self.timeout, message, self._check_open)
            for index in late:
                if self._peers[index] in arrived:
                    self._take_message(index, self._peers[index].read())

    def _take_message(self, index: int, message: PublishMessage) -> None:
        if message.publish == self.publish:
            if message.failure:
                raise TransportError(f"publish {self.publish} ended early: {message.failure}")
            self._buckets_read[index] = message.buckets

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the channel was closed")

    def close(self) -> None:
        """Close from any thread. A publish in progress in another thread fails first, with a TransportError."""
        self._closed = True
        with self._busy:
            for peer in self._peers.values():
                peer.connection.close()
            self._peers, self._sharing, self._memory = {}, set(), None
            close_listener(self._listener, self._path)


class SharedBufferReceiver(ABC):
    """``Receiver`` over shared memory. The tensors it yields may be views of that memory."""

    def __init__(self, address: SharedBufferAddress, index: int, device: torch.device) -> None:
        self.address, self.index, self.device = address, index, device
        self.sender = connect_to_sender(address.path, index, address.receivers)
        self._memory: Tensor | None = None

    @abstractmethod
    def _open_memory(self, handle: Any) -> Tensor:
        """Open the sender's memory, [size] uint8."""

    def receive(self, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
        publish, memory = self._begin(manifest_digest(manifest))
        placed = place_buckets(split_into_buckets(manifest, self.address.bucket_size), memory.numel())
        with self._reporting_failure(publish):
            for count, place in enumerate(placed, 1):
                self._wait_until_filled(publish)
                for item in place.bucket.tensors:
                    yield item.entry.name, view_in_bucket(memory, item, place.start).to(self.device)
                for stream in _current_streams(self.device, memory.device):
                    stream.synchronize()
                self.sender.send(PublishMessage(publish, count))

    def _begin(self, digest: str) -> tuple[int, Tensor]:
        """Wait for the next publish. Return its number and the shared memory. Publishes that were aborted meanwhile are skipped."""
        while True:
            message = self._read("begin to send")
            if message.memory is not None:
                self._memory = None
                with self._reporting_failure(message.publish):
                    self._memory = self._open_memory(message.memory)
            if message.digest and message.digest != digest:
                reason = "its manifest is not the sender's: pass the same manifest on both sides"
                self._report_failure(message.publish, reason)
                raise TransportError(f"receiver {self.index}: {reason}")
            if message.digest and not self.sender.has_message():  # a message here can only mean that this publish was aborted
                assert self._memory is not None
                self.sender.send(PublishMessage(message.publish))
                return message.publish, self._memory

    def _wait_until_filled(self, publish: int) -> None:
        message = self._read("fill the next bucket")
        if message.failure:
            raise TransportError(f"the sender aborted publish {publish}: {message.failure}")

    def _read(self, action: str) -> PublishMessage:
        timeout = self.address.timeout
        wait_for_peers([self.sender], timeout, f"{self.sender.peer} did not {action} within {timeout:g} s")
        message: PublishMessage = self.sender.read()
        return message

    @contextmanager
    def _reporting_failure(self, publish: int) -> Iterator[None]:
        """Report to the sender why this receiver cannot continue, including when its caller stops iterating."""
        try:
            yield
        except BaseException as error:
            reason = "its reader stopped" if isinstance(error, GeneratorExit) else f"{type(error).__name__}: {error}"
            with suppress(TransportError):
                self._report_failure(publish, reason)
            raise

    def _report_failure(self, publish: int, reason: str) -> None:
        self.sender.send(PublishMessage(publish, failure=f"receiver {self.index}: {reason}"))

    def close(self) -> None:
        self.sender.connection.close()
        self._memory = None


def _format_receivers(indexes: Sequence[int]) -> str:
    return ("receiver " if len(indexes) == 1 else "receivers ") + ", ".join(map(str, indexes))


def _current_streams(*devices: torch.device) -> list[torch.Stream]:
    return [torch.get_device_module(device).current_stream(device) for device in devices if is_gpu(device)]


def _buffer_capacity(buckets: Sequence[Bucket], bucket_size: int, slots: int) -> int:
    """Return the bytes of a buffer: the whole model if that is smaller, else the largest bucket and ``slots`` - 1 of ``bucket_size``."""
    sizes = [bucket.nbytes for bucket in buckets]
    return max(1, min(sum(sizes), max([bucket_size, *sizes]) + (slots - 1) * bucket_size))
