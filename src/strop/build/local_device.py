"""The device of this process by the name of a configuration. torch is imported only where there may be a GPU."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path


def resolve_device_name(device: str) -> str:
    """Return cpu, cuda or cuda:N; "auto" is a GPU if there is one. Raises ValueError if the GPU that is asked for is missing."""
    if device == "auto":
        return "cuda" if has_gpu() else "cpu"
    if device.startswith("cuda") and not has_gpu():
        raise ValueError(f"policy.device is {device}, and torch finds no GPU here; set policy.device=cpu or auto")
    return device


def has_gpu() -> bool:
    if "torch" not in sys.modules and not _has_driver():
        return False
    import torch

    return torch.cuda.is_available()


def _has_driver() -> bool:
    """Return whether the driver of an NVIDIA or AMD GPU is installed, without which torch finds none."""
    if Path("/dev/kfd").exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1" if os.name == "posix" else "nvcuda.dll")
    except OSError:
        return False
    return True


def count_threads(configured: int | None) -> int | None:
    """Return how many threads torch computes with on CPUs; None if that is known only once it is imported."""
    if configured is not None:
        return configured
    if "torch" in sys.modules:
        import torch

        return torch.get_num_threads()
    requested = os.environ.get("OMP_NUM_THREADS", "")
    return int(requested) if requested.isdigit() and int(requested) > 0 else None
