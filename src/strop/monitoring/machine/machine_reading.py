"""A reading of a machine, and metrics from two readings."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
MB = 1_000_000


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """One GPU at one moment. None: not reported by its driver."""

    utilization: float | None = None  # percent of the recent sampling period in which a kernel ran
    memory: float | None = None  # bytes in use
    memory_total: float | None = None
    power: float | None = None  # watts
    temperature: float | None = None  # degrees Celsius


@dataclass(frozen=True, kw_only=True)
class MachineReading:
    """A machine at one moment. Counters start at boot; None: not reported by this system."""

    seconds: float  # when
    cpu_busy: float | None = None  # seconds of all processors
    cpu_total: float | None = None
    memory: float | None = None  # bytes in use
    memory_total: float | None = None
    process_memory: float | None = None  # bytes of this process
    disk_free: float | None = None  # bytes, where the log folder is
    disk_read: float | None = None  # bytes since the start
    disk_written: float | None = None
    network_received: float | None = None
    network_sent: float | None = None
    gpus: tuple[GpuReading, ...] = ()


def describe_machine(before: MachineReading, now: MachineReading) -> dict[str, float]:
    """Return the metrics of a machine between two readings: percentages, GiB, MB (10^6 bytes) per second, watts."""
    found: dict[str, float | None] = {
        "cpu_percent": _share(before, now),
        "memory_gib": _scaled(now.memory, GIB),
        "memory_percent": None if now.memory is None or not now.memory_total else 100 * now.memory / now.memory_total,
        "process_memory_gib": _scaled(now.process_memory, GIB),
        "disk_free_gib": _scaled(now.disk_free, GIB),
    }
    for name in ("disk_read", "disk_written", "network_received", "network_sent"):
        found[f"{name}_mb_per_sec"] = _rate(getattr(before, name), getattr(now, name), now.seconds - before.seconds)
    for index, gpu in enumerate(now.gpus):
        found |= {
            f"gpu_{index}/utilization_percent": gpu.utilization,
            f"gpu_{index}/memory_gib": _scaled(gpu.memory, GIB),
            f"gpu_{index}/memory_percent": None
            if gpu.memory is None or not gpu.memory_total
            else 100 * gpu.memory / gpu.memory_total,
            f"gpu_{index}/power_watts": gpu.power,
            f"gpu_{index}/temperature_celsius": gpu.temperature,
        }
    return {name: value for name, value in found.items() if value is not None}


def _share(before: MachineReading, now: MachineReading) -> float | None:
    if before.cpu_busy is None or now.cpu_busy is None or before.cpu_total is None or now.cpu_total is None:
        return None
    total = now.cpu_total - before.cpu_total
    return min(100.0, max(0.0, 100 * (now.cpu_busy - before.cpu_busy) / total)) if total > 0 else None  # the kernel rounds


def _rate(before: float | None, now: float | None, seconds: float) -> float | None:
    """Return MB per second; None for a counter that was reset (an interface was removed)."""
    return None if before is None or now is None or now < before or seconds <= 0 else (now - before) / MB / seconds


def _scaled(value: float | None, unit: int) -> float | None:
    return None if value is None else value / unit
