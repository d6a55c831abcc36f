"""The numbers of training and generation devices, and whether the run needs Ray."""

from __future__ import annotations

from strop.config.schema.run_config import RolloutRunConfig, TrainingRunConfig
from strop.distributed.placement import DeviceCounts, DevicePlan, PlacementError, count_section_devices, plan_devices


def count_devices(config: TrainingRunConfig) -> DeviceCounts:
    generation = config.policy.generation if isinstance(config, RolloutRunConfig) else None
    return count_section_devices(config.cluster, generation, needs_ranks=config.policy.learner.needs_ranks)


def plan_gpus(config: TrainingRunConfig) -> DevicePlan | None:
    """Return the placement of ranks and engines on a cluster with GPUs; None for a run without Ray, or a layout that does not
    fit.
    """
    counts = count_devices(config)
    try:
        return plan_devices(counts, on_cpu=False) if counts.uses_ray else None
    except PlacementError:
        return None
