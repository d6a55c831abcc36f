"""The GPUs visible to this process. torch is imported only if there may be one."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

KIND = "cuda"  # as torch names the GPUs of NVIDIA and AMD; the tests have a simulated kind
VISIBLE = "CUDA_VISIBLE_DEVICES"  # set by a scheduler such as Slurm, or by the user: indices, or UUIDs of GPUs or MIG slices


def has_gpu() -> bool:
    if "torch" not in sys.modules and not _has_driver():
        return False
    import torch

    return bool(torch.get_device_module(KIND).is_available())


def visible_gpus() -> list[str]:
    """Return the GPUs visible to this process, in torch's order, as values for another process's ``CUDA_VISIBLE_DEVICES``."""
    if not has_gpu():
        return []
    import torch

    count = torch.get_device_module(KIND).device_count()
    inherited = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return (inherited or [str(number) for number in range(count)])[:count]


def describe_visible() -> str:
    """Describe the GPUs visible to this process: "2 GPUs (CUDA_VISIBLE_DEVICES=2,3)"."""
    count = len(visible_gpus())
    inherited = os.environ.get(VISIBLE)
    return f"{count or 'no'} GPU{'' if count == 1 else 's'}" + (f" ({VISIBLE}={inherited})" if inherited is not None else "")


def sees_mig_slices() -> bool:
    """Return whether the GPUs of this process are MIG slices."""
    return os.environ.get(VISIBLE, "").strip().startswith("MIG-")


def _has_driver() -> bool:
    """Return whether an NVIDIA or AMD driver is installed; torch finds no GPU without one."""
    if Path("/dev/kfd").exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1" if os.name == "posix" else "nvcuda.dll")
    except OSError:
        return False
    return True
