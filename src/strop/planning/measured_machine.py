"""The rates of this machine's CPU, measured in less than ten seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from strop.hardware.devices import Device
from strop.hardware.machine_memory import total_memory

SIDE = 1536  # of the square matrices
BUFFER = 1 << 28  # bytes that are read to measure bandwidth: more than a cache holds
SECONDS = 2.0  # of each measurement
REPEATS = 5  # at least


def measure_machine(threads: int | None = None) -> Device:
    """Return this machine as a device: matrix rates in float32 and bfloat16, the bandwidth of its memory, and its size,
    or its container's.

    ``threads``: CPU threads; None is torch's own choice.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        rates = [_measure_products(dtype) for dtype in (torch.bfloat16, torch.float32)]
        bandwidth = _measure_bandwidth()
    finally:
        torch.set_num_threads(before)
    return Device(
        name=f"this machine ({threads or before} threads)",
        bf16_tflops=rates[0] / 1e12,
        fp8_tflops=None,
        fp32_tflops=rates[1] / 1e12,
        memory_gib=total_memory() / 2**30,
        bandwidth_gb=bandwidth / 1e9,
        link_gb=bandwidth / 1e9,
        devices_per_node=1,
        measured=True,
    )


def _measure_products(dtype: object) -> float:
    """Return FLOPs a second of a square product."""
    import torch

    left, right = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(2))  # type: ignore[call-overload]
    return 2.0 * SIDE**3 / _time(lambda: left @ right)


def _measure_bandwidth() -> float:
    """Return bytes a second of reading memory."""
    import torch

    numbers = torch.ones(BUFFER // 4)
    return BUFFER / _time(numbers.sum)


def _time(work: Callable[[], object]) -> float:
    """Return the median seconds of ``work``."""
    work()
    found: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(found) < REPEATS or time.perf_counter() < end:
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return median(found)
