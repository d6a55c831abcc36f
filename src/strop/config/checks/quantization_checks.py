"""Rules about ``policy.quant_cfg`` that need more than the policy's section."""

from __future__ import annotations

from collections.abc import Iterator

from strop.config.checks.device_counts import count_devices
from strop.config.schema.run_config import RolloutRunConfig, TrainingRunConfig
from strop.models.fake_quant.modelopt_config import QuantConfigError
from strop.problems import Problem


def check_adapters_of_other_processes(config: TrainingRunConfig) -> Iterator[Problem]:
    """Torch engines in other processes have adapters merged, and then round the inputs of the adapters too."""
    if not isinstance(config, RolloutRunConfig) or not config.policy.dtensor_cfg.lora_cfg.enabled:
        return
    try:
        rounds_inputs = config.policy.rounds_inputs
    except QuantConfigError:  # the section reports it
        return
    if rounds_inputs and not config.policy.generation.uses_engines and count_devices(config).uses_ray:
        yield Problem(
            "policy.quant_cfg",
            f"{config.policy.quant_cfg} rounds inputs of layers with adapters, which read inputs as they are; torch engines in other "
            "processes have the adapters merged, and would round what those read",
            "Set it to a configuration of weights alone, or cluster.backend=local on one device; or train without adapters "
            "(policy.dtensor_cfg.lora_cfg.enabled=false).",
        )
