"""Errors for features that this version does not have, with what to set instead.

One function per feature; delete it when the feature is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from strop.config.schema.run_config import EvalRunConfig, TrainingRunConfig, generation_section, list_trained_models
from strop.problems import Problem

Problems = Iterator[Problem]


def check_megatron_learner(config: TrainingRunConfig) -> Problems:
    for key, model in list_trained_models(config):
        if model.megatron_cfg.enabled:
            yield Problem(
                f"{key}.megatron_cfg.enabled",
                "found true, but the Megatron Core learner backend is not in this version",
                f"Set {key}.megatron_cfg.enabled=false and {key}.dtensor_cfg.enabled=true for the torch learner.",
            )


def check_learner_enabled(config: TrainingRunConfig) -> Problems:
    for key, model in list_trained_models(config):
        if not model.dtensor_cfg.enabled and not model.megatron_cfg.enabled:
            yield Problem(
                f"{key}.dtensor_cfg.enabled",
                f"found false, and {key}.megatron_cfg.enabled is false too, which leaves no learner",
                f"Set {key}.dtensor_cfg.enabled=true.",
            )


def check_dynamic_batching(config: TrainingRunConfig) -> Problems:
    for key, model in list_trained_models(config):
        if model.dynamic_batching.enabled:
            yield Problem(
                f"{key}.dynamic_batching.enabled",
                "found true, but padded dynamic batching is not in this version",
                f"Set it to false and {key}.sequence_packing.enabled=true, which has token budgets without padding.",
            )


def check_generation_backend(config: TrainingRunConfig | EvalRunConfig) -> Problems:
    key, generation = generation_section(config)
    names = {"sglang": "SGLang", "megatron": "Megatron"}
    if generation.backend in names:
        yield Problem(
            f"{key}.backend",
            f"found {generation.backend}, but the {names[generation.backend]} generation backend is not in this version",
            f"Set {key}.backend to vllm, or to torch, the engine built into Strop.",
        )


def check_pipeline_parallel_engine(config: TrainingRunConfig | EvalRunConfig) -> Problems:
    """The weight readback does not yet distinguish the layers of pipeline stages."""
    key, generation = generation_section(config)
    if generation.backend == "vllm" and (size := generation.vllm_cfg.pipeline_parallel_size) > 1:
        yield Problem(
            f"{key}.vllm_cfg.pipeline_parallel_size",
            f"found {size}, but this version does not have engines with pipeline parallelism: it cannot verify their weights",
            f"Set it to 1, and {key}.vllm_cfg.tensor_parallel_size for a model that needs several GPUs.",
        )


COMMON_UNSUPPORTED_CHECKS: tuple[Callable[[Any], Problems], ...] = (
    check_generation_backend,
    check_pipeline_parallel_engine,
)
TRAINING_UNSUPPORTED_CHECKS: tuple[Callable[[Any], Problems], ...] = (
    check_megatron_learner,
    check_learner_enabled,
    check_dynamic_batching,
)
