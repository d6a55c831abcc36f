"""A ring buffer of buckets in memory shared by sender and receivers, the common part of the host-memory and CUDA IPC transports.

    sender                                                receiver
    SharedSegment, BeginPublish(number, digest)  ------>
                                                 <------  ReceiverReady(number)
    fills bucket 0
    BucketFilled(number, 0, start)               ------>  yields its tensors, as views
    fills bucket 1 meanwhile
    BucketFilled(number, 1, start)               ------>
                                                 <------  BucketTaken(number, 0): its memory is free once all receivers sent this

An error on one side reaches the other as ``PublishAbandoned`` or as the end of the connection. Numbers increase with each publish, and
messages about an older one are dropped, so that those of an aborted publish are never mistaken for the current one.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from strop.weight_sync.base import Manifest, NamedTensors, TransportError
from strop.weight_sync.transports.control import (
    BeginPublish,
    BucketFilled,
    BucketTaken,
    ControlConnection,
    ControlServer,
    Message,
    PublishAbandoned,
    ReceiverReady,
    SharedSegment,
)
from strop.weight_sync.transports.manifest import (
    Bucket,
    align_up,
    manifest_digest,
    match_tensors,
    split_into_buckets,
    view_in_bucket,
)


class RingSpan(NamedTuple):
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


class RingBuffer:
    """Allocates memory for buckets in a segment, and frees it in the order of allocation."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: deque[RingSpan] = deque()

    def allocate(self, size: int) -> int | None:
        """Allocate ``size`` contiguous bytes and return their start. None if they are not free yet."""
        if (start := self._find(size)) is not None:
            self.used.append(RingSpan(start, size))
        return start

    def _find(self, size: int) -> int | None:
        if not self.used:
            return 0 if size <= self.capacity else None
        oldest, newest = self.used[0].start, self.used[-1].end
        if newest > oldest:  # free: from the end of the newest to the capacity, and from 0 to the oldest
            if self.capacity - newest >= size:
                return newest
            return 0 if oldest >= size else None
        return newest if oldest - newest >= size else None

    def free_oldest(self) -> None:
        """Free the oldest allocation."""
        self.used.popleft()


class RingSender(ABC):
    """``Sender`` over shared memory. Subclasses allocate the memory and send receivers a handle to it."""

    def __init__(self, receivers: int, *, bucket_size: int, slots: int, timeout: float) -> None:
        if slots < 1:
            raise ValueError(f"found slots={slots}; set at least one, or two so that both sides work at the same time")
        self.receivers, self.bucket_size, self.slots, self.timeout = receivers, align_up(bucket_size), slots, timeout
        self.server = ControlServer(receivers, timeout)
        self._busy = threading.Lock()  # held during a publish and while closing
        self.number = 0
        self._memory: Tensor | None = None  # flat uint8
        self._holders: dict[int, ControlConnection] = {}  # connections of the receivers that have the memory
        self._ring = RingBuffer(0)
        self._freed_buckets = 0  # buckets that are free again
        self._taken_buckets: dict[int, int] = {}  # receiver -> number of buckets it has read

    @abstractmethod
    def _allocate(self, size: int) -> Tensor:
        """Return memory to share, [size] uint8."""

    @abstractmethod
    def _send_memory(self, connection: ControlConnection) -> None:
        """Send a ``SharedSegment``, and whatever else the receiver needs to open the memory."""

    def _copy_in(self, target: Tensor, tensor: Tensor) -> None:
        """Cast and copy in one operation."""
        target.copy_(tensor)

    def _wait_for_copies(self) -> None:
        """Wait until all copies into the bucket are complete."""
        return

    @torch.no_grad()
    def send(self, manifest: Manifest, tensors: NamedTensors) -> None:
        with self._busy:
            self.number += 1
            try:
                buckets = split_into_buckets(manifest, self.bucket_size)
                self._begin(manifest, buckets)
                self._fill(buckets, manifest, tensors)
                self._wait_for_buckets(len(buckets))
            except BaseException as error:
                for connection in self.server.connections.values():
                    with suppress(TransportError):
                        connection.send(PublishAbandoned(self.number, f"{type(error).__name__}: {error}"))
                raise

    def _begin(self, manifest: Manifest, buckets: tuple[Bucket, ...]) -> None:
        """Start a publish. Returns when all receivers wait for the first bucket."""
        self.server.wait_for_connections()
        capacity = _ring_capacity([bucket.nbytes for bucket in buckets], self.bucket_size, self.slots)
        if self._memory is None or self._memory.numel() < capacity:
            self._memory, self._holders = None, {}  # free the old memory before allocating more
            self._memory = self._allocate(capacity)
        self._ring = RingBuffer(self._memory.numel())
        self._freed_buckets, self._taken_buckets = 0, dict.fromkeys(range(self.receivers), 0)
        for index, connection in self.server.connections.items():
            if self._holders.get(index) is not connection:
                self._send_memory(connection)
                self._holders[index] = connection
        self.server.send_all(BeginPublish(self.number, manifest_digest(manifest)))
        pending = set(range(self.receivers))
        while pending:
            for index, message in self.server.wait_for_messages(pending, "begin to receive"):
                if self._is_current(message) and isinstance(message, ReceiverReady):
                    pending.discard(index)

    def _fill(self, buckets: tuple[Bucket, ...], manifest: Manifest, tensors: NamedTensors) -> None:
        assert self._memory is not None
        matched = match_tensors(manifest, tensors)
        for number, bucket in enumerate(buckets):
            start = self._allocate_bucket(bucket.nbytes)
            for item in bucket.tensors:
                self._copy_in(view_in_bucket(self._memory, item, start), next(matched)[1].detach())
            self._wait_for_copies()
            self.server.send_all(BucketFilled(self.number, number, start))
        next(matched, None)  # raises if there are more tensors than in the manifest

    def _allocate_bucket(self, size: int) -> int:
        while (start := self._ring.allocate(size)) is None:
            self._wait_for_buckets(self._freed_buckets + 1)
        return start

    def _wait_for_buckets(self, count: int) -> None:
        """Wait until every receiver has read ``count`` buckets, and free them."""
        while pending := [index for index, taken in self._taken_buckets.items() if taken < count]:
            for index, message in self.server.wait_for_messages(pending, f"read bucket {count}"):
                if self._is_current(message) and isinstance(message, BucketTaken):
                    self._taken_buckets[index] = message.bucket + 1
        for _ in range(self._freed_buckets, read := min(self._taken_buckets.values())):
            self._ring.free_oldest()
        self._freed_buckets = read

    def _is_current(self, message: Message) -> bool:
        """Whether a message belongs to this publish. Raises TransportError if it says that a receiver aborted it."""
        if getattr(message, "number", 0) != self.number:
            return False
        if isinstance(message, PublishAbandoned):
            raise TransportError(f"publish {self.number} ended early: {message.reason}")
        return True

    def close(self) -> None:
        """Close from any thread. A publish in progress in another thread fails first, with a TransportError."""
        self.server.stop()
        with self._busy:
            self.server.close()
            self._memory, self._holders = None, {}


class RingReceiver(ABC):
    """``Receiver`` over shared memory. The tensors it yields may be views of that memory."""

    def __init__(self, connection: ControlConnection, index: int, device: torch.device, bucket_size: int) -> None:
        self.connection, self.index, self.device, self.bucket_size = connection, index, device, bucket_size
        self._memory: Tensor | None = None

    @abstractmethod
    def _open_memory(self, segment: SharedSegment) -> Tensor:
        """Open the sender's memory, [size] uint8."""

    def _wait_for_reads(self) -> None:
        """Wait until all reads from the bucket are complete."""
        return

    def receive(self, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
        number = self._begin(manifest)
        try:
            for count, bucket in enumerate(split_into_buckets(manifest, self.bucket_size)):
                start = self._wait_until_filled(number)
                assert self._memory is not None
                for item in bucket.tensors:
                    yield item.entry.name, view_in_bucket(self._memory, item, start).to(self.device)
                self._wait_for_reads()
                self.connection.send(BucketTaken(number, count))
        except BaseException as error:  # also GeneratorExit, if the caller stops iterating
            reason = "its reader stopped" if isinstance(error, GeneratorExit) else f"{type(error).__name__}: {error}"
            with suppress(TransportError):
                self.connection.send(PublishAbandoned(number, f"receiver {self.index}: {reason}"))
            raise

    def _begin(self, manifest: Manifest) -> int:
        """Wait for the next publish and return its number. Publishes that were aborted meanwhile are skipped."""
        while True:
            message = self.connection.receive("begin to send")
            if isinstance(message, SharedSegment):
                self._memory = None
                self._memory = self._open_memory(message)
            elif isinstance(message, BeginPublish):
                if message.digest != manifest_digest(manifest):
                    reason = "its manifest is not the sender's: pass the same manifest on both sides"
                    self.connection.send(PublishAbandoned(message.number, f"receiver {self.index}: {reason}"))
                    raise TransportError(f"receiver {self.index}: {reason}")
                if not self.connection.has_message():  # a message here can only say that this publish was already aborted
                    self.connection.send(ReceiverReady(message.number))
                    return message.number

    def _wait_until_filled(self, number: int) -> int:
        """Wait for the next bucket and return its start."""
        while True:
            message = self.connection.receive("fill the next bucket")
            if isinstance(message, BucketFilled) and message.number == number:
                return message.start
            if isinstance(message, PublishAbandoned) and message.number == number:
                raise TransportError(f"the sender aborted publish {number}: {message.reason}")

    def close(self) -> None:
        self.connection.close()
        self._memory = None


def _ring_capacity(sizes: list[int], bucket_size: int, slots: int) -> int:
    """Return the bytes of a segment: the whole model if that is smaller, else the largest bucket and ``slots`` - 1 of ``bucket_size``."""
    return max(1, min(sum(sizes), max([bucket_size, *sizes]) + (slots - 1) * bucket_size))
