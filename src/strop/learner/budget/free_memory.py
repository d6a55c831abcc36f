"""The memory of a device that is free for this process."""

from __future__ import annotations

from pathlib import Path

import torch

from strop.device_copies import is_gpu
from strop.hardware import CGROUPS, PROC, iter_limits, read_meminfo


def measure_free(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a device, including unused memory held by torch's allocator.

    Raises ValueError if a CPU's free memory cannot be read.
    """
    if is_gpu(device):
        gpu = torch.get_device_module(device)
        gpu.empty_cache()
        return int(gpu.mem_get_info(device)[0] + gpu.memory_reserved(device) - gpu.memory_allocated(device))
    return measure_free_host()


def measure_free_host(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the free bytes of the host: the memory available without swapping, within the limits of this process's control
    groups.

    Raises ValueError where they cannot be read.
    """
    free = read_meminfo("MemAvailable", proc)
    if free is None:
        raise ValueError(
            "train_mb_tokens: found auto, but the free memory of this machine cannot be read (/proc/meminfo has no MemAvailable). Set it "
            "to a number of tokens"
        )
    return min([free, *(limit.left for limit in iter_limits(proc, cgroups))])
