"""Weight transport through CUDA IPC memory: the sender packs buckets on its GPU, and receivers on the same machine read them there.

A receiver on the same GPU yields views of that memory; a receiver on another GPU copies the tensors over. Both must see the sender's GPU
(``CUDA_VISIBLE_DEVICES``), under any index. The protocol is that of ``ring_buffer``.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.weight_sync.base import TransportError
from strop.weight_sync.transports.control import ControlConnection, SharedSegment, connect_to_sender
from strop.weight_sync.transports.ring_buffer import RingReceiver, RingSender

BUCKET_SIZE = 256 << 20
SLOTS = 2
TIMEOUT = 120.0


@dataclass(frozen=True)
class CudaIpcAddress:
    """Address of a sender on this machine."""

    path: str  # of its Unix socket
    receivers: int
    bucket_size: int  # bytes
    timeout: float  # seconds

    def connect(self, index: int, device: torch.device) -> CudaIpcReceiver:
        """Raises TransportError if the sender is gone, ValueError if ``device`` is not a GPU."""
        if device.type != "cuda":
            raise ValueError(
                f"{device} cannot read another process's GPU memory; set device to a GPU, or use the host-memory transport"
            )
        return CudaIpcReceiver(connect_to_sender(self.path, index, self.receivers, self.timeout), index, device, self.bucket_size)


class CudaIpcSender(RingSender):
    """Packs buckets on ``device``, the learner's GPU.

    Allocates ``slots`` x ``bucket_size`` bytes there, more if a tensor is larger than a bucket.
    """

    def __init__(
        self,
        receivers: int,
        *,
        device: torch.device,
        bucket_size: int = BUCKET_SIZE,
        slots: int = SLOTS,
        timeout: float = TIMEOUT,
    ) -> None:
        if device.type != "cuda":
            raise ValueError(f"{device} is not a GPU: use the host-memory transport")
        super().__init__(receivers, bucket_size=bucket_size, slots=slots, timeout=timeout)
        self.device = device

    @property
    def address(self) -> CudaIpcAddress:
        return CudaIpcAddress(self.server.path, self.receivers, self.bucket_size, self.timeout)

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _send_memory(self, connection: ControlConnection) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        assert self._memory is not None
        _, arguments = reduce_tensor(self._memory)  # once per receiver: torch counts the references to the memory
        connection.send(SharedSegment(self._memory.numel(), pickle.dumps(_IpcHandle(_gpu_uuid(self._memory.device), arguments))))

    def _copy_in(self, target: Tensor, tensor: Tensor) -> None:
        target.copy_(tensor, non_blocking=True)

    def _wait_for_copies(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()


class CudaIpcReceiver(RingReceiver):
    """On the sender's GPU, yields views of the sender's memory, which must not be written to."""

    def _open_memory(self, segment: SharedSegment) -> Tensor:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        handle: _IpcHandle = pickle.loads(segment.handle)
        visible = [number for number in range(torch.cuda.device_count()) if _gpu_uuid(torch.device("cuda", number)) == handle.gpu]
        if not visible:
            self.connection.close()  # so that the sender does not wait for this receiver
            raise TransportError(
                f"receiver {self.index} does not see the sender's GPU {handle.gpu}: add it to CUDA_VISIBLE_DEVICES of the generator, "
                "or use the host-memory transport"
            )
        memory: Tensor = rebuild_cuda_tensor(*handle.rebuild_arguments(visible[0]))
        return memory

    def _wait_for_reads(self) -> None:
        for device in {self.device, self._memory.device if self._memory is not None else self.device}:
            torch.cuda.current_stream(device).synchronize()

    def close(self) -> None:
        super().close()
        torch.cuda.ipc_collect()


@dataclass(frozen=True)
class _IpcHandle:
    """A picklable handle to open the sender's memory in another process."""

    gpu: str  # UUID; the index of a GPU may differ between processes
    arguments: tuple[Any, ...]  # for torch's rebuild_cuda_tensor

    def rebuild_arguments(self, number: int) -> tuple[Any, ...]:
        """Return the arguments with the GPU's index in this process."""
        return (*self.arguments[:6], number, *self.arguments[7:])


def _gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
