"""Weight transport through shared host memory, between processes of one machine.

The memory is an anonymous file whose descriptor is passed to the receivers over their connection. It is freed when the last process that
has it open ends, so it needs no cleanup, and the size of /dev/shm does not limit it. The sender casts and copies each tensor into it in one
operation; receivers read it in place.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction

import torch
from torch import Tensor

from strop.weight_sync.transports.control import ControlConnection, SharedSegment, connect_to_sender
from strop.weight_sync.transports.ring_buffer import RingReceiver, RingSender

BUCKET_SIZE = 16 << 20
SLOTS = 4
TIMEOUT = 120.0


@dataclass(frozen=True)
class MemoryAddress:
    """Address of a sender on this machine."""

    path: str  # of its Unix socket
    receivers: int
    bucket_size: int  # bytes
    timeout: float  # seconds

    def connect(self, index: int, device: torch.device) -> MemoryReceiver:
        """Raises TransportError if the sender is gone."""
        return MemoryReceiver(connect_to_sender(self.path, index, self.receivers, self.timeout), index, device, self.bucket_size)


class MemorySender(RingSender):
    """Fills a bucket of ``bucket_size`` bytes while up to ``slots`` - 1 others are read.

    ``timeout`` is the limit in seconds for each message of a receiver, and so for connecting and for reading one bucket.
    """

    def __init__(self, receivers: int, *, bucket_size: int = BUCKET_SIZE, slots: int = SLOTS, timeout: float = TIMEOUT) -> None:
        super().__init__(receivers, bucket_size=bucket_size, slots=slots, timeout=timeout)
        self._file = -1
        self._streams: set[torch.cuda.Stream] = set()  # streams with pending copies into the bucket

    @property
    def address(self) -> MemoryAddress:
        return MemoryAddress(self.server.path, self.receivers, self.bucket_size, self.timeout)

    def _allocate(self, size: int) -> Tensor:
        self._close_file()
        self._file = _create_anonymous_file()
        os.ftruncate(self._file, size)
        return _map_file(self._file, size)

    def _send_memory(self, connection: ControlConnection) -> None:
        assert self._memory is not None
        connection.send(SharedSegment(self._memory.numel()))
        try:
            reduction.send_handle(connection.connection, self._file, connection.pid)
        except OSError:
            raise connection.make_lost_error() from None

    def _copy_in(self, target: Tensor, tensor: Tensor) -> None:
        target.copy_(tensor, non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            self._streams.add(torch.cuda.current_stream(tensor.device))

    def _wait_for_copies(self) -> None:
        for stream in self._streams:
            stream.synchronize()
        self._streams.clear()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def close(self) -> None:
        super().close()
        self._close_file()


class MemoryReceiver(RingReceiver):
    """On the CPU, yields views of the shared memory, which must not be written to."""

    def _open_memory(self, segment: SharedSegment) -> Tensor:
        try:
            file: int = reduction.recv_handle(self.connection.connection)
        except (OSError, EOFError, RuntimeError):
            raise self.connection.make_lost_error() from None
        try:
            return _map_file(file, segment.size)
        finally:
            os.close(file)


def _create_anonymous_file() -> int:
    """Return a descriptor of an anonymous file, which is freed with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("strop-weights", os.MFD_CLOEXEC)
    file, path = tempfile.mkstemp(prefix="strop-weights-")
    os.unlink(path)
    return file


def _map_file(file: int, size: int) -> Tensor:
    """Map the file as a tensor [size] uint8. It is unmapped with the last tensor that views it."""
    memory = mmap.mmap(file, size)
    with suppress(AttributeError, OSError):  # huge pages mean fewer page faults, where the system supports them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
