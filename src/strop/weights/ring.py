"""A ring of buckets in memory that sender and receivers share: what host memory and CUDA IPC have in common.

    sender                                            receiver
    Segment, Begin(number, digest)  ----------------->
                                    <-----------------  Ready(number)
    fills bucket 0
    Filled(number, 0, start)        ----------------->  yields its tensors, as they lie there
    fills bucket 1 meanwhile
    Filled(number, 1, start)        ----------------->
                                    <-----------------  Taken(number, 0): its place is free once all have said so

Whatever goes wrong on one side reaches the other as ``Abandoned`` or as the end of the connection. Numbers grow with each publish, and
words about an older one are dropped, so nothing that is left of an aborted publish is taken for new.
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
    """Places for buckets in a segment, freed in the order in which they were given."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: deque[Span] = deque()

    def place(self, size: int) -> int | None:
        """The start of ``size`` free bytes in one piece, which are used from now on; None where there are none yet."""
        if (start := self._find(size)) is not None:
            self.used.append(Span(start, size))
        return start

    def _find(self, size: int) -> int | None:
        if not self.used:
            return 0 if size <= self.capacity else None
        oldest, newest = self.used[0].start, self.used[-1].end
        if newest > oldest:  # free: from the newest to the end, and from 0 to the oldest
            if self.capacity - newest >= size:
                return newest
            return 0 if oldest >= size else None
        return newest if oldest - newest >= size else None

    def free(self) -> None:
        """The oldest one."""
        self.used.popleft()


class RingSender(ABC):
    """``Sender`` over shared memory. A subclass says what memory that is, and how receivers come to have it."""

    def __init__(self, receivers: int, *, bucket_size: int, slots: int, timeout: float) -> None:
        if slots < 1:
            raise ValueError(f"{slots} buckets at a time carry nothing; with two or more both sides work at once")
        self.receivers, self.bucket_size, self.slots, self.timeout = receivers, aligned(bucket_size), slots, timeout
        self.hub = Hub(receivers, timeout)
        self._busy = threading.Lock()  # with a publish, or with the end
        self.number = 0
        self._memory: Tensor | None = None  # flat uint8
        self._holders: dict[int, Link] = {}  # who has the memory
        self._ring = Ring(0)
        self._released = 0  # buckets whose place is free again
        self._taken: dict[int, int] = {}  # receiver -> buckets it has read

    @abstractmethod
    def _allocate(self, size: int) -> Tensor:
        """Memory to share: [size] uint8."""

    @abstractmethod
    def _hand_over(self, link: Link) -> None:
        """Send a ``Segment``, and what else it takes to have the memory at the other end."""

    def _write(self, place: Tensor, tensor: Tensor) -> None:
        """Cast and copy in one go."""
        place.copy_(tensor)

    def _written(self) -> None:
        """Return when everything of the bucket is there."""
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
        """All receivers wait for the first bucket when this returns."""
        self.hub.gather()
        capacity = _capacity([bucket.size for bucket in cut], self.bucket_size, self.slots)
        if self._memory is None or self._memory.numel() < capacity:
            self._memory, self._holders = None, {}  # given back before more is asked for
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
        next(given, None)  # raises where there is a tensor too many

    def _room(self, size: int) -> int:
        while (start := self._ring.place(size)) is None:
            self._wait_for(self._released + 1)
        return start

    def _wait_for(self, count: int) -> None:
        """Return when every receiver has read ``count`` buckets, and give their places free."""
        while late := [index for index, taken in self._taken.items() if taken < count]:
            for index, message in self.hub.hear(late, f"take bucket {count}"):
                if self._is_current(message) and isinstance(message, Taken):
                    self._taken[index] = message.bucket + 1
        for _ in range(self._released, read := min(self._taken.values())):
            self._ring.free()
        self._released = read

    def _is_current(self, message: Message) -> bool:
        """Whether it is about this publish. Raises TransportError where it says that there will be none."""
        if getattr(message, "number", 0) != self.number:
            return False
        if isinstance(message, Abandoned):
            raise TransportError(f"publish {self.number} ended early: {message.reason}")
        return True

    def close(self) -> None:
        """From any thread: a publish in another one ends first, with a TransportError."""
        self.hub.stop()
        with self._busy:
            self.hub.close()
            self._memory, self._holders = None, {}


class RingReceiver(ABC):
    """``Receiver`` over shared memory; what it yields lies there."""

    def __init__(self, link: Link, index: int, device: torch.device, bucket_size: int) -> None:
        self.link, self.index, self.device, self.bucket_size = link, index, device, bucket_size
        self._memory: Tensor | None = None

    @abstractmethod
    def _take_over(self, segment: Segment) -> Tensor:
        """The sender's memory: [size] uint8."""

    def _read(self) -> None:
        """Return when nothing reads from the bucket any more."""
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
        except BaseException as error:  # also where the reader reads no further
            reason = "its reader stopped" if isinstance(error, GeneratorExit) else f"{type(error).__name__}: {error}"
            with suppress(TransportError):
                self.link.send(Abandoned(number, f"receiver {self.index}: {reason}"))
            raise

    def _begin(self, manifest: Manifest) -> int:
        """The number of the publish that begins; those that were given up meanwhile are passed over."""
        while True:
            message = self.link.receive("begin to send")
            if isinstance(message, Segment):
                self._memory = None
                self._memory = self._take_over(message)
            elif isinstance(message, Begin):
                if message.digest != digest(manifest):
                    reason = "its manifest is not the sender's: both sides have to be given the same one"
                    self.link.send(Abandoned(message.number, f"receiver {self.index}: {reason}"))
                    raise TransportError(f"receiver {self.index}: {reason}")
                if not self.link.pending():  # nothing can follow but the end of a publish that nobody waits for any more
                    self.link.send(Ready(message.number))
                    return message.number

    def _filled(self, number: int) -> int:
        """Where the next bucket lies."""
        while True:
            message = self.link.receive("fill the next bucket")
            if isinstance(message, Filled) and message.number == number:
                return message.start
            if isinstance(message, Abandoned) and message.number == number:
                raise TransportError(f"the sender gave publish {number} up: {message.reason}")

    def close(self) -> None:
        self.link.close()
        self._memory = None


def _capacity(sizes: list[int], bucket_size: int, slots: int) -> int:
    """Bytes of a segment: the whole model where that is less than the ring; else the largest bucket and ``slots`` - 1 usual ones."""
    return max(1, min(sum(sizes), max([bucket_size, *sizes]) + (slots - 1) * bucket_size))
