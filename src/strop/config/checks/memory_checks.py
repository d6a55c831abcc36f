"""Rules about ``train_mb_tokens: auto``: where memory can be measured before the first step."""

from __future__ import annotations

from collections.abc import Iterator

from strop.config.checks.device_counts import count_devices
from strop.config.schema.run_config import RolloutRunConfig, TrainingRunConfig, list_trained_models
from strop.learner.model_config import ModelConfig
from strop.problems import Problem


def check_measured_budget(config: TrainingRunConfig) -> Iterator[Problem]:
    """Memory is measured by the torch learner, before engines start: what takes more of it later must be known."""
    for key, model in list_trained_models(config):
        if model.batching.train_mb_tokens != "auto":
            continue
        if (obstacle := _find_obstacle(config, model)) is not None:
            yield Problem(
                f"{key}.{model.batching_key}.train_mb_tokens", f"found auto, but {obstacle}", "Set it to a number of tokens."
            )


def _find_obstacle(config: TrainingRunConfig, model: ModelConfig) -> str | None:
    """Return why the memory of a micro-batch cannot be measured at the start of a run; None if it can."""
    if model.megatron_cfg.enabled:
        return "the Megatron Core learner measures no memory"
    if model.dtensor_cfg.pipeline_parallel_size > 1:
        return "with pipeline stages several micro-batches are in memory at once, how many depends on the batch"
    if not isinstance(config, RolloutRunConfig) or not config.policy.generation.colocated.enabled:
        return None
    if config.policy.generation.uses_engines or count_devices(config).uses_ray:
        return (
            "an engine in another process shares the learner's device (policy.generation.colocated.enabled), and starts after the memory "
            "is measured"
        )
    return None
