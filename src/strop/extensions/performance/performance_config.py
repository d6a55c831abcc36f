"""Keys of ``logger``: what is logged of machines and of their use."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from strop.base_config import BaseConfig, subsection


class GpuMonitoringConfig(BaseConfig):
    """How often GPUs and machines are sampled."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    collection_interval: float = Field(10, gt=0, description="Seconds between two samples of each machine (s).")
    flush_interval: float = Field(
        10,
        gt=0,
        description="Seconds between two reports of a machine to the driver (s). A step logs the means since the last one.",
    )


class PerformanceConfig(BaseConfig):
    """What a run logs of its machines as system/... and perf/..."""

    monitor_gpus: bool = Field(
        True, description="Log the utilisation of each machine's GPUs, processors, memory, disk and network, as system/...."
    )
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="Peak arithmetic of one training device, for perf/mfu (10^12 FLOPs per second). null: from a table of GPUs.",
    )
    gpu_monitoring: GpuMonitoringConfig = subsection(GpuMonitoringConfig)
