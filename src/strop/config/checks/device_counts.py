"""How many devices train, how many generate, and whether the run needs Ray."""

from __future__ import annotations

from strop.config.schema.run_config import RolloutRunConfig, TrainingRunConfig
from strop.distributed.placement import DeviceCounts, count_section_devices


def count_devices(config: TrainingRunConfig) -> DeviceCounts:
    return count_section_devices(config.cluster, config.policy.generation if isinstance(config, RolloutRunConfig) else None)
