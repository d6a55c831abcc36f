"""What can be said of GPU memory between processes without a GPU; tests/gpu has the rest."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from strop.weight_sync.transports.cuda_ipc import CudaIpcReceiver, CudaIpcSender, _IpcHandle
from strop.weight_sync.transports.shared_buffer import SharedBufferAddress


def test_both_ends_are_gpus() -> None:
    with pytest.raises(ValueError, match="cpu is not a GPU"):
        CudaIpcSender(1, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="cpu cannot read another process's GPU memory"):
        SharedBufferAddress(CudaIpcReceiver, "nowhere", 1, 1, 1.0).connect(0, torch.device("cpu"))


def test_a_handle_is_opened_under_the_number_that_the_gpu_has_here() -> None:
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    handle = _IpcHandle("uuid", tuple(names))
    found = dict(zip(names, handle.rebuild_arguments(3), strict=True))
    assert found.pop("storage_device") == 3
    assert all(name == value for name, value in found.items())
