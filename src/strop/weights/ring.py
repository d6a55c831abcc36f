"""A ring buffer of buckets in memory shared by sender and receivers, the common part of the host-memory and CUDA IPC transports.

    sender                                            receiver
    Segment, Begin(number, digest)  ----------------->
                                    <-----------------  Ready(number)
    fills bucket 0
    Filled(number, 0, start)        ----------------->  yields its tensors, as views
    fills bucket 1 meanwhile
    Filled(number, 1, start)        ----------------->
                                    <-----------------  Taken(number, 0): its memory is free once all receivers have sent this

An error on one side reaches the other as ``Abandoned`` or as the end of the connection. Numbers increase with each publish, and messages
about an older one are dropped, so that remains of an aborted publish are never mistaken for the current one.
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

from strop.weights.base import Manifest, NamedTensors, TransportError
from strop.weights.control import Abandoned, Begin, Filled, Hub, Link, Message, Ready, Segment, Taken
from strop.weights.manifest import Bucket, aligned, buckets, digest, matched, view


class Span(NamedTuple):
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


class Ring:
    """Allocates memory for buckets in a segment, and frees it in the order of allocation."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: deque[Span] = deque()

    def place(self, size: int) -> int | None:
        """Allocate ``size`` contiguous bytes and return their start. None if they are not free yet."""
        if (start := self._find(size)) is not None:
            self.used.append(Span(start, size))
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

    def free(self) -> None:
        """Free the oldest allocation."""
        self.used.popleft()


class RingSender(ABC):
    """``Sender`` over shared memory. Subclasses allocate the memory and send receivers a handle to it."""

    def __init__(self, receivers: int, *, bucket_size: int, slots: int, timeout: float) -> None:
        if slots < 1:
            raise ValueError(f"found slots={slots}; set at least one, or two so that both sides work at the same time")
        self.receivers, self.bucket_size, self.slots, self.timeout = receivers, aligned(bucket_size), slots, timeout
        self.hub = Hub(receivers, timeout)
        self._busy = threading.Lock()  # held during a publish and while closing
        self.number = 0
        self._memory: Tensor | None = None  # flat uint8
        self._holders: dict[int, Link] = {}  # connections of the receivers that have the memory
        self._ring = Ring(0)
        self._released = 0  # buckets that are free again
        self._taken: dict[int, int] = {}  # receiver -> number of buckets it has read

    @abstractmethod
    def _allocate(self, size: int) -> Tensor:
        """Return memory to share, [size] uint8."""

    @abstractmethod
    def _hand_over(self, link: Link) -> None:
        """Send a ``SharedSegment``, and whatever else the receiver needs to open the memory."""

    def _write(self, place: Tensor, tensor: Tensor) -> None:
        """Cast and copy in one operation."""
        place.copy_(tensor)

    def _written(self) -> None:
        """Wait until all copies into the bucket are complete."""
        return

    @torch.no_grad()
    def send(self, manifest: Manifest, tensors: NamedTensors) -> None:
        with self._busy:
            self.number += 1
            try:
                cut = buckets(manifest, self.bucket_size)
                self._begin(manifest, cut)
                self._fill(cut, manifest, tensors)
                self._wait_for(len(cut))
            except BaseException as error:
                for link in self.hub.links.values():
                    with suppress(TransportError):
                        link.send(Abandoned(self.number, f"{type(error).__name__}: {error}"))
                raise

    def _begin(self, manifest: Manifest, cut: tuple[Bucket, ...]) -> None:
        """Start a publish. Returns when all receivers wait for the first bucket."""
        self.hub.gather()
        capacity = _capacity([bucket.size for bucket in cut], self.bucket_size, self.slots)
        if self._memory is None or self._memory.numel() < capacity:
            self._memory, self._holders = None, {}  # free the old memory before allocating more
            self._memory = self._allocate(capacity)
        self._ring = Ring(self._memory.numel())
        self._released, self._taken = 0, dict.fromkeys(range(self.receivers), 0)
        for index, link in self.hub.links.items():
            if self._holders.get(index) is not link:
                self._hand_over(link)
                self._holders[index] = link
        self.hub.tell(Begin(self.number, digest(manifest)))
        silent = set(range(self.receivers))
        while silent:
            for index, message in self.hub.hear(silent, "begin to receive"):
                if self._is_current(message) and isinstance(message, Ready):
                    silent.discard(index)

    def _fill(self, cut: tuple[Bucket, ...], manifest: Manifest, tensors: NamedTensors) -> None:
        assert self._memory is not None
        given = matched(manifest, tensors)
        for number, bucket in enumerate(cut):
            start = self._room(bucket.size)
            for placed in bucket.tensors:
                self._write(view(self._memory, placed, start), next(given)[1].detach())
            self._written()
            self.hub.tell(Filled(self.number, number, start))
        next(given, None)  # raises if there are more tensors than in the manifest

    def _room(self, size: int) -> int:
        while (start := self._ring.place(size)) is None:
            self._wait_for(self._released + 1)
        return start

    def _wait_for(self, count: int) -> None:
        """Wait until every receiver has read ``count`` buckets, and free them."""
        while late := [index for index, taken in self._taken.items() if taken < count]:
            for index, message in self.hub.hear(late, f"read bucket {count}"):
                if self._is_current(message) and isinstance(message, Taken):
                    self._taken[index] = message.bucket + 1
        for _ in range(self._released, read := min(self._taken.values())):
            self._ring.free()
        self._released = read

    def _is_current(self, message: Message) -> bool:
        """Whether a message belongs to this publish. Raises TransportError if it says that a receiver aborted it."""
        if getattr(message, "number", 0) != self.number:
            return False
        if isinstance(message, Abandoned):
            raise TransportError(f"publish {self.number} ended early: {message.reason}")
        return True

    def close(self) -> None:
        """Close from any thread. A publish in progress in another thread fails first, with a TransportError."""
        self.hub.stop()
        with self._busy:
            self.hub.close()
            self._memory, self._holders = None, {}


class RingReceiver(ABC):
    """``Receiver`` over shared memory. The tensors it yields may be views of that memory."""

    def __init__(self, link: Link, index: int, device: torch.device, bucket_size: int) -> None:
        self.link, self.index, self.device, self.bucket_size = link, index, device, bucket_size
        self._memory: Tensor | None = None

    @abstractmethod
    def _take_over(self, segment: Segment) -> Tensor:
        """Open the sender's memory, [size] uint8."""

    def _read(self) -> None:
        """Wait until all reads from the bucket are complete."""
        return

    def receive(self, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
        number = self._begin(manifest)
        try:
            for count, bucket in enumerate(buckets(manifest, self.bucket_size)):
                start = self._filled(number)
                assert self._memory is not None
                for placed in bucket.tensors:
                    yield placed.entry.name, view(self._memory, placed, start).to(self.device)
                self._read()
                self.link.send(Taken(number, count))
        except BaseException as error:  # also GeneratorExit, if the caller stops iterating
            reason = "its reader stopped" if isinstance(error, GeneratorExit) else f"{type(error).__name__}: {error}"
            with suppress(TransportError):
                self.link.send(Abandoned(number, f"receiver {self.index}: {reason}"))
            raise

    def _begin(self, manifest: Manifest) -> int:
        """Wait for the next publish and return its number. Publishes that were aborted meanwhile are skipped."""
        while True:
            message = self.link.receive("begin to send")
            if isinstance(message, Segment):
                self._memory = None
                self._memory = self._take_over(message)
            elif isinstance(message, Begin):
                if message.digest != digest(manifest):
                    reason = "its manifest is not the sender's: pass the same manifest on both sides"
                    self.link.send(Abandoned(message.number, f"receiver {self.index}: {reason}"))
                    raise TransportError(f"receiver {self.index}: {reason}")
                if not self.link.pending():  # a message here can only say that this publish was already aborted
                    self.link.send(Ready(message.number))
                    return message.number

    def _filled(self, number: int) -> int:
        """Wait for the next bucket and return its start."""
        while True:
            message = self.link.receive("fill the next bucket")
            if isinstance(message, Filled) and message.number == number:
                return message.start
            if isinstance(message, Abandoned) and message.number == number:
                raise TransportError(f"the sender aborted publish {number}: {message.reason}")

    def close(self) -> None:
        self.link.close()
        self._memory = None


def _capacity(sizes: list[int], bucket_size: int, slots: int) -> int:
    """Return the bytes of a segment: the whole model if that is smaller, else the largest bucket and ``slots`` - 1 of ``bucket_size``."""
    return max(1, min(sum(sizes), max([bucket_size, *sizes]) + (slots - 1) * bucket_size))
