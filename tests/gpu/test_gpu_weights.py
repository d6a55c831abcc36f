"""Weights from and to GPUs, between real processes."""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest
import torch

from strop.gpus import KIND
from strop.weight_sync.base import ChannelAddress, Sender
from strop.weight_sync.fingerprints import combine_fingerprints, fingerprint
from strop.weight_sync.transports.broadcast import BroadcastSender
from strop.weight_sync.transports.cuda_ipc import CudaIpcSender
from strop.weight_sync.transports.host_memory import MemorySender
from support.simulated_device.in_process import take_simulated_gpu
from support.transports import expected_fingerprints, make_manifest, make_tensors, receive_fingerprints, spawn_child

pytestmark = pytest.mark.gpu

GPU = torch.get_device_module(KIND)

CUDA = torch.device(KIND, 0)
SMALL = 64 << 10


def receive_on_gpu(pipe: Connection, kind: str, address: ChannelAddress, index: int, number: int) -> None:
    if kind == "sim":
        take_simulated_gpu()
    device = torch.device(kind, number)
    torch.get_device_module(device).set_device(device)
    receiver = address.connect(index, device)
    pipe.send("connected")
    while (manifest := pipe.recv()) is not None:
        pipe.send(receive_fingerprints(receiver, manifest))
    receiver.close()


def on_gpu(seed: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.to(CUDA)) for name, tensor in make_tensors(seed)]


def arrives(sender: Sender, number: int = 0) -> None:
    """Two publishes, bit for bit."""
    manifest = make_manifest()
    with spawn_child(receive_on_gpu, KIND, sender.address, 0, number, fresh=KIND == "cuda") as receiver:
        assert receiver.answer(120) == "connected"  # as a run has it: who dies earlier has no sender that waits for it
        for seed in range(2):
            receiver.pipe.send(manifest)
            sender.send(manifest, on_gpu(seed))
            assert receiver.answer(120) == expected_fingerprints(make_tensors(seed), manifest)
    sender.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32])
def test_fingerprints_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 256, (3001, 520 * dtype.itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype)
    there = tensor.to(CUDA)
    assert fingerprint(there) == fingerprint(tensor)
    assert combine_fingerprints((fingerprint(there[:, :99]), fingerprint(there[:, 99:], columns=99))) == fingerprint(tensor)


def test_through_host_memory() -> None:
    arrives(MemorySender(1, bucket_size=SMALL, timeout=60))


def test_through_gpu_memory() -> None:
    arrives(CudaIpcSender(1, device=CUDA, bucket_size=SMALL, timeout=60))


def test_by_gloo_broadcast() -> None:
    arrives(BroadcastSender(1, bucket_size=SMALL, timeout=60))


@pytest.mark.skipif(GPU.device_count() < 2, reason="NCCL needs a GPU for each rank")
def test_by_nccl_broadcast() -> None:
    arrives(BroadcastSender(1, backend="nccl", device=CUDA, bucket_size=SMALL, timeout=60), 1)


@pytest.mark.skipif(GPU.device_count() < 2, reason="needs two GPUs")
def test_through_gpu_memory_to_another_gpu() -> None:
    arrives(CudaIpcSender(1, device=CUDA, bucket_size=SMALL, timeout=60), 1)
