"""Weight transport through CUDA IPC memory: the sender packs buckets on its GPU, where receivers on the same machine read them.

A receiver on the same GPU yields views of that memory; a receiver on another GPU copies the tensors over. Both must see the sender's GPU
(``CUDA_VISIBLE_DEVICES``), under any index. The protocol is that of ``shared_buffer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.weight_sync.base import TransportError
from strop.weight_sync.transports.choose import SenderFactory, SenderSetup
from strop.weight_sync.transports.connection import PeerConnection
from strop.weight_sync.transports.shared_buffer import (
    PublishMessage,
    SharedBufferAddress,
    SharedBufferReceiver,
    SharedBufferSender,
)

BUCKET_SIZE = 256 << 20
SLOTS = 2
TIMEOUT = 120.0


class CudaIpcReceiver(SharedBufferReceiver):
    """On the sender's GPU, yields views of the sender's memory, which must not be written to."""

    def __init__(self, address: SharedBufferAddress, index: int, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"{device} cannot read another process's GPU memory; set device to a GPU, or use the host-memory transport"
            )
        super().__init__(address, index, device)

    def _open_memory(self, handle: _IpcHandle) -> Tensor:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        visible = [number for number in range(torch.cuda.device_count()) if _gpu_uuid(torch.device("cuda", number)) == handle.gpu]
        if not visible:
            self.sender.connection.close()  # so that the sender does not wait for this receiver
            raise TransportError(
                f"receiver {self.index} does not see the sender's GPU {handle.gpu}: add it to CUDA_VISIBLE_DEVICES of the generator, "
                "or use the host-memory transport"
            )
        memory: Tensor = rebuild_cuda_tensor(*handle.rebuild_arguments(visible[0]))
        return memory

    def close(self) -> None:
        super().close()
        torch.cuda.ipc_collect()


class CudaIpcSender(SharedBufferSender):
    """Packs buckets on ``device``, the learner's GPU.

    Allocates ``slots`` x ``bucket_size`` bytes there, more if a tensor is larger than a bucket.
    """

    receiver_type = CudaIpcReceiver

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

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _send_memory(self, memory: Tensor, peer: PeerConnection) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        _, arguments = reduce_tensor(memory)  # once per receiver: torch counts the references to the memory
        peer.send(PublishMessage(self.publish, memory=_IpcHandle(_gpu_uuid(memory.device), arguments)))


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


def make_senders(setup: SenderSetup) -> SenderFactory:
    return lambda receivers: CudaIpcSender(receivers, device=setup.device, timeout=setup.config.timeout_seconds, **setup.bucket)
