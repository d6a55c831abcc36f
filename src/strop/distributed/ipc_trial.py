"""``python -m strop.distributed.ipc_trial cuda``: send a tensor from this process to another one, as weights are sent to an engine."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from multiprocessing.process import BaseProcess

import torch

from strop.weight_sync.base import ChannelAddress, Manifest, Sender
from strop.weight_sync.transports.cuda_ipc import CudaIpcSender
from strop.weight_sync.transports.host_memory import MemorySender
from strop.weight_sync.transports.manifest import build_manifest

SECONDS = 60.0


def send_to_process(device: torch.device) -> None:
    """Raises TransportError, or what the transport raises, if the other process cannot read it."""
    tensors = [("trial", torch.arange(1024, dtype=torch.float32, device=device))]
    manifest = build_manifest(tensors, None)
    sender: Sender = (
        MemorySender(1, timeout=SECONDS)
        if device.type == "cpu"
        else CudaIpcSender(1, device=device, bucket_size=1 << 16, timeout=SECONDS)
    )
    reader = multiprocessing.get_context("spawn").Process(target=read, args=(sender.address, str(device), manifest), daemon=True)
    reader.start()
    threading.Thread(target=close_after, args=(reader, sender), daemon=True).start()
    sender.send(manifest, tensors)
    reader.join(SECONDS)
    if reader.exitcode:
        raise RuntimeError("the other process read other numbers, or ended early")


def read(address: ChannelAddress, device: str, manifest: Manifest) -> None:
    receiver = address.connect(0, torch.device(device))
    for _, tensor in receiver.receive(manifest):
        assert tensor.tolist() == list(range(1024))
    receiver.close()


def close_after(reader: BaseProcess, sender: Sender) -> None:
    """End the sender with a reader that died before it connected."""
    reader.join()
    if reader.exitcode:
        sender.close()


if __name__ == "__main__":
    try:
        send_to_process(torch.device(sys.argv[1]))
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
