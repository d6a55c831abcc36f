"""How many devices train, how many generate, and whether the run needs Ray."""

from __future__ import annotations

from dataclasses import dataclass

from strop.config.schema.run_config import RolloutRunConfig, TrainingRunConfig
from strop.generation.generation_config import GenerationConfig


@dataclass(frozen=True, kw_only=True)
class DeviceCounts:
    """The devices of a training run. A device is a GPU, or on machines without GPUs a process."""

    nodes: int
    per_node: int
    learner_devices: int  # devices that train, in total
    engine_size: int  # devices of one engine
    engines: int | None  # None: as many as fit; 0: the run does not sample
    engine_devices: int | None = None  # per node, for generation only
    engine_nodes: int | None = None  # whole nodes for generation only
    uses_ray: bool = False


def count_devices(config: TrainingRunConfig) -> DeviceCounts:
    nodes, per_node, backend = config.cluster.num_nodes, config.cluster.gpus_per_node, config.cluster.backend
    samples = isinstance(config, RolloutRunConfig)
    generation = config.policy.generation
    size, engines = (engine_size(generation), count_engines(generation)) if samples else (1, 0)
    engine_devices, engine_nodes = (
        _generation_only_devices(generation, nodes, per_node, size, engines) if samples else (None, None)
    )
    learner = (nodes - (engine_nodes or 0)) * (per_node - (engine_devices or 0))
    ray = backend == "ray" or (backend == "auto" and (nodes > 1 or learner > 1))
    return DeviceCounts(
        nodes=nodes,
        per_node=per_node,
        learner_devices=learner if ray else 1,
        engine_size=size,
        engines=engines,
        engine_devices=engine_devices,
        engine_nodes=engine_nodes,
        uses_ray=ray,
    )


def engine_size(generation: GenerationConfig) -> int:
    return generation.vllm_cfg.tensor_parallel_size if generation.backend == "vllm" else 1


def count_engines(generation: GenerationConfig) -> int | None:
    return generation.vllm_cfg.num_engines if generation.backend == "vllm" else generation.torch_cfg.num_engines


def _generation_only_devices(
    generation: GenerationConfig, nodes: int, per_node: int, size: int, engines: int | None
) -> tuple[int | None, int | None]:
    """Return (devices per node, nodes) that only generate."""
    if generation.colocated.enabled:
        return None, None
    resources = generation.colocated.resources
    if nodes > 1 and resources.num_nodes is not None and resources.gpus_per_node in (None, per_node):
        return None, min(resources.num_nodes, nodes)
    requested = resources.gpus_per_node or (-(-(engines * size) // nodes) if engines else per_node // 2)
    return min(requested, per_node), None
