"""Rules about ``policy.exact_on_policy`` that need more than the policy's section."""

from __future__ import annotations

from collections.abc import Iterator

from strop.config.checks.device_counts import count_devices
from strop.config.schema.run_config import RolloutRunConfig, TrainingRunConfig
from strop.problems import Problem


def check_one_process(config: TrainingRunConfig) -> Iterator[Problem]:
    """Shapes are compared in the process that computes with them, and those of sharded weights never are."""
    if not isinstance(config, RolloutRunConfig) or not config.policy.exact_on_policy:
        return
    if count_devices(config).uses_ray:
        yield Problem(
            "policy.exact_on_policy",
            "found true, but this run has its learner in processes of its own (Ray), and only a learner and an engine of one process "
            "are known to agree to the last bit",
            "Set cluster.backend=local on one device, or policy.exact_on_policy=false.",
        )
