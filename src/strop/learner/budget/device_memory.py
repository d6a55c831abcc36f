"""The memory of a device and of its host: what is free, the peak of some work, what to set when it is full, and glibc's allocator."""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from strop.device_copies import is_gpu
from strop.hardware import CGROUPS, PROC, iter_limits, read_meminfo
from strop.monitoring.process_profile import quiet_profiler


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


def measure_peak(work: Callable[[], object], device: torch.device) -> int:
    """Call ``work`` and return the peak of its allocations in bytes, beyond what was allocated before.

    On a CPU torch's profiler reports every allocation, so the result does not depend on memory freed earlier.
    """
    if is_gpu(device):
        gpu = torch.get_device_module(device)
        gpu.synchronize(device)
        gpu.reset_peak_memory_stats(device)
        before = int(gpu.memory_allocated(device))
        work()
        gpu.synchronize(device)
        return int(gpu.max_memory_allocated(device)) - before
    with quiet_profiler(), torch.autograd.profiler.profile(profile_memory=True) as profile:
        work()
    events: Any = profile.kineto_results
    held = peak = 0
    for event in sorted((each for each in events.events() if each.name() == "[memory]"), key=lambda each: each.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


class DeviceMemoryFull(RuntimeError):
    """A pass did not fit into the memory of its device. The message says what to set."""


@contextmanager
def explain_full_memory(key: str, tokens: int, *, trains: bool) -> Iterator[None]:
    """Convert torch's error into DeviceMemoryFull. ``key``: the key of the token budget, whose value was ``tokens``; ``trains``:
    with a backward pass.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        section = key.partition(".")[0]
        further = f", {section}.dtensor_cfg.activation_checkpointing=true or activation_offload=true" if trains else ""
        raise DeviceMemoryFull(
            f"{key}: the device has no memory for a micro-batch of at most {tokens} tokens. Set it to a smaller number, at least "
            f"policy.max_total_sequence_length; if it is already that small, lower {section}.logprob_chunk_size{further}. The gradient "
            f"stays the same. torch reports: {error}"
        ) from error


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
STEPS_BETWEEN_TRIMS = 10


def reuse_freed_memory() -> bool:
    """Keep freed memory in the process instead of returning it to the system. Return whether that is supported (glibc only).

    By default glibc maps every large block with mmap and unmaps it when it is freed, so a training step touches gigabytes of new pages,
    each of which costs a page fault: a fifth of a step on a small machine. A process that repeats the same step needs the same
    blocks again. The cost is memory: fragments too small for later blocks stay allocated until ``trim_freed_memory``.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


@contextmanager
def repeating_steps() -> Iterator[None]:
    """Prepare this process for steps that are alike: it keeps freed memory, and the garbage collector leaves what is there alone.

    Libraries have a million objects, which the collector would traverse again in each step that makes as many as a quarter of that. The
    objects of thousands of rollouts live for a step: traversing them after every 700 new ones is in vain.
    """
    reuse_freed_memory()
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(10_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def trim_freed_memory(step: int = 0) -> None:
    """Return free memory to the system, every ten steps: blocks of varying sizes leave fragments that add up to gigabytes."""
    if step % STEPS_BETWEEN_TRIMS == 0 and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
