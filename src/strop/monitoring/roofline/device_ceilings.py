"""The ceilings of a device: FLOPs a second in each number format, and bytes a second of its memory.

Roofline: Williams, Waterman and Patterson (2009), "Roofline: an insightful visual performance model for multicore architectures".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strop.hardware.devices import Device

FORMATS = ("bfloat16", "float16", "float32", "fp8")


@dataclass(frozen=True, kw_only=True)
class DeviceCeilings:
    """What a device can do at most, and where that is known from."""

    device: str
    flops: Mapping[str, float]  # FLOPs a second, by number format: bfloat16, float32, ...
    bandwidth: float  # of its memory, bytes a second
    cache_bandwidth: float | None = None  # of a processor's cache, bytes a second; None: not known
    source: str  # in words: measured on a day, or the table of devices

    def peak(self, precision: str) -> float:
        """Return FLOPs a second in a number format; of one that is not known the highest, so that no share is flattered."""
        return self.flops.get(precision) or max(self.flops.values())

    def least_seconds(self, flops: float, moved: float, precision: str) -> float:
        """Return the seconds that so many FLOPs and bytes take at least, where arithmetic and memory overlap in full."""
        return max(flops / self.peak(precision), moved / self.bandwidth)

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "flops": dict(self.flops),
            "bandwidth": self.bandwidth,
            "cache_bandwidth": self.cache_bandwidth,
            "source": self.source,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DeviceCeilings:
        """Return what ``to_dict`` wrote. Raises ValueError for anything else."""
        try:
            flops = {str(name): float(rate) for name, rate in values["flops"].items()}
            bandwidth, cache = float(values["bandwidth"]), values.get("cache_bandwidth")
            found = cls(
                device=str(values["device"]),
                flops=flops,
                bandwidth=bandwidth,
                cache_bandwidth=None if cache is None else float(cache),
                source=str(values["source"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"these are no ceilings of a device: {error}") from error
        if not flops or not all(0 < rate < 1e30 for rate in (*flops.values(), bandwidth)):
            raise ValueError("these are no ceilings of a device: a rate is missing or not positive")
        return found

    @classmethod
    def of_device(cls, device: Device) -> DeviceCeilings:
        """Return the ceilings of a device of the table."""
        flops = {}
        for name in FORMATS:
            try:
                flops[name] = device.peak_flops(name)
            except ValueError:  # it has no such arithmetic
                continue
        return cls(
            device=device.name,
            flops=flops,
            bandwidth=device.bandwidth_gb * 1e9,
            source="the vendor's figures, in the table of devices",
        )
