"""Parts that this version does not have: asked for, they are refused when the run starts, with what to set instead.

One small function a part; the work that brings the part deletes its function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from strop.config.errors import Problem
from strop.config.schema import EvalRunConfig, TrainingRunConfig, generation_of, trained_models

Problems = Iterator[Problem]


def megatron_learner(config: TrainingRunConfig) -> Problems:
    for key, model in trained_models(config):
        if model.megatron_cfg.enabled:
            yield Problem(
                f"{key}.megatron_cfg.enabled",
                "found true, but the Megatron Core learner backend is not in this version",
                f"Set {key}.megatron_cfg.enabled=false and {key}.dtensor_cfg.enabled=true for the torch learner.",
            )


def no_learner(config: TrainingRunConfig) -> Problems:
    for key, model in trained_models(config):
        if not model.dtensor_cfg.enabled and not model.megatron_cfg.enabled:
            yield Problem(
                f"{key}.dtensor_cfg.enabled",
                f"found false, and {key}.megatron_cfg.enabled is false too, so nothing would train",
                f"Set {key}.dtensor_cfg.enabled=true.",
            )


def parallel_learner(config: TrainingRunConfig) -> Problems:
    for key, model in trained_models(config):
        for name, what in (("tensor_parallel_size", "Tensor parallelism"), ("context_parallel_size", "Context parallelism")):
            if (size := getattr(model.dtensor_cfg, name)) > 1:
                yield Problem(
                    f"{key}.dtensor_cfg.{name}",
                    f"found {size}, but this version trains on one device. {what} is not in it",
                    f"Set {key}.dtensor_cfg.{name}=1.",
                )


def sequence_parallel(config: TrainingRunConfig) -> Problems:
    for key, model in trained_models(config):
        if model.dtensor_cfg.sequence_parallel:
            yield Problem(
                f"{key}.dtensor_cfg.sequence_parallel",
                "found true, but sequence parallelism is not in this version",
                "Set it to false.",
            )


def custom_parallel_plan(config: TrainingRunConfig) -> Problems:
    for key, model in trained_models(config):
        if model.dtensor_cfg.custom_parallel_plan is not None:
            yield Problem(
                f"{key}.dtensor_cfg.custom_parallel_plan",
                "a plan is set, but tensor parallelism is not in this version",
                "Set it to null.",
            )


def cpu_offload(config: TrainingRunConfig) -> Problems:
    for key, model in trained_models(config):
        if model.dtensor_cfg.cpu_offload:
            yield Problem(
                f"{key}.dtensor_cfg.cpu_offload",
                "found true, but offloading parameters is not in this version",
                "Set it to false; policy.reference.offload=true frees the reference policy's memory.",
            )


def dynamic_batching(config: TrainingRunConfig) -> Problems:
    for key, model in trained_models(config):
        if model.dynamic_batching.enabled:
            yield Problem(
                f"{key}.dynamic_batching.enabled",
                "found true, but padded dynamic batching is not in this version",
                f"Set it to false and {key}.sequence_packing.enabled=true, which cuts by tokens too, without padding.",
            )


def generation_backend(config: TrainingRunConfig | EvalRunConfig) -> Problems:
    key, generation = generation_of(config)
    names = {"sglang": "SGLang", "megatron": "Megatron"}
    if generation.backend in names:
        yield Problem(
            f"{key}.backend",
            f"found {generation.backend}, but the {names[generation.backend]} generation backend is not in this version",
            f"Set {key}.backend to vllm, or to torch, the engine embedded in Strop.",
        )


def generation_apart(config: TrainingRunConfig | EvalRunConfig) -> Problems:
    key, generation = generation_of(config)
    if not generation.colocated.enabled and generation.backend in ("auto", "torch"):
        yield Problem(
            f"{key}.colocated.enabled",
            f"found false, but {key}.backend {generation.backend} runs on the learner's own module",
            f"Set {key}.colocated.enabled=true, or {key}.backend=vllm.",
        )


def pipeline_parallel_engine(config: TrainingRunConfig | EvalRunConfig) -> Problems:
    """Its processes hold other layers: what they hold is not told apart yet when it is read back."""
    key, generation = generation_of(config)
    if generation.backend == "vllm" and (size := generation.vllm_cfg.pipeline_parallel_size) > 1:
        yield Problem(
            f"{key}.vllm_cfg.pipeline_parallel_size",
            f"found {size}, but engines with pipeline parallelism, whose weights cannot be proven yet, are not in this version",
            f"Set it to 1, and {key}.vllm_cfg.tensor_parallel_size for a model that needs several GPUs.",
        )


def one_node(config: TrainingRunConfig | EvalRunConfig) -> Problems:
    if config.cluster.num_nodes > 1:
        yield Problem(
            "cluster.num_nodes",
            f"found {config.cluster.num_nodes}, but this version runs on one machine",
            "Set cluster.num_nodes=1.",
        )


def ray_cluster(config: TrainingRunConfig | EvalRunConfig) -> Problems:
    if config.cluster.backend == "ray":
        yield Problem(
            "cluster.backend", "found ray, but Ray actors are not in this version", "Set cluster.backend to auto or local."
        )


BOTH_UNSUPPORTED: tuple[Callable[[Any], Problems], ...] = (
    generation_backend,
    generation_apart,
    pipeline_parallel_engine,
    one_node,
    ray_cluster,
)
TRAINING_UNSUPPORTED: tuple[Callable[[Any], Problems], ...] = (
    megatron_learner,
    no_learner,
    parallel_learner,
    sequence_parallel,
    custom_parallel_plan,
    cpu_offload,
    dynamic_batching,
)
