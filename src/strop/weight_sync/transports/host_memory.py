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
from multiprocessing import reduction

import torch
from torch import Tensor

from strop.weight_sync.transports.choose import SenderFactory, SenderSetup
from strop.weight_sync.transports.connection import PeerConnection
from strop.weight_sync.transports.shared_buffer import PublishMessage, SharedBufferReceiver, SharedBufferSender

BUCKET_SIZE = 16 << 20
SLOTS = 4
TIMEOUT = 120.0


class MemoryReceiver(SharedBufferReceiver):
    """On the CPU, yields views of the shared memory, which must not be written to."""

    def _open_memory(self, handle: int) -> Tensor:
        """Receive the file's descriptor, which follows ``handle``, its size, and map it."""
        try:
            file: int = reduction.recv_handle(self.sender.connection)
        except (OSError, EOFError, RuntimeError):
            raise self.sender.make_lost_error() from None
        try:
            return _map_file(file, handle)
        finally:
            os.close(file)


class MemorySender(SharedBufferSender):
    """Fills a bucket of ``bucket_size`` bytes while up to ``slots`` - 1 others are read.

    ``timeout`` is the limit in seconds for each message of a receiver, and so for connecting and for reading one bucket.
    """

    receiver_type = MemoryReceiver

    def __init__(self, receivers: int, *, bucket_size: int = BUCKET_SIZE, slots: int = SLOTS, timeout: float = TIMEOUT) -> None:
        super().__init__(receivers, bucket_size=bucket_size, slots=slots, timeout=timeout)
        self._file = -1

    def _allocate(self, size: int) -> Tensor:
        self._close_file()
        self._file = _create_anonymous_file()
        os.ftruncate(self._file, size)
        return _map_file(self._file, size)

    def _send_memory(self, memory: Tensor, peer: PeerConnection) -> None:
        peer.send(PublishMessage(self.publish, memory=memory.numel()))
        try:
            reduction.send_handle(peer.connection, self._file, peer.pid)
        except OSError:
            raise peer.make_lost_error() from None

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def close(self) -> None:
        super().close()
        self._close_file()


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


def make_senders(setup: SenderSetup) -> SenderFactory:
    return lambda receivers: MemorySender(receivers, timeout=setup.config.timeout_seconds, **setup.bucket)
