"""Checks about devices and processes that need more than one section: sizes that fit, Ray's presence, unused devices; their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from strop import packages
from strop.base_config import changed_keys, iter_sections
from strop.config.schema.run_config import (
    EvalRunConfig,
    PpoRunConfig,
    RolloutRunConfig,
    TrainingRunConfig,
    generation_section,
    list_trained_models,
)
from strop.distributed.cluster_config import ClusterConfig
from strop.distributed.placement import (
    DeviceCounts,
    DevicePlan,
    PlacementError,
    count_engines,
    count_section_devices,
    engine_size,
    plan_devices,
)
from strop.learner.learner_config import TORCH, LearnerSection, WithLearner
from strop.problems import Problem


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


Problems = Iterator[Problem]


def check_parallel_sizes(config: TrainingRunConfig) -> Problems:
    counts = count_devices(config)
    sections = {f"{key}.{model.learner_key}": model.learner for key, model in list_trained_models(config)}
    for key, model in config.scoring_models.items():
        if not model.uses_torch:
            sections[f"{key}.{model.learner_key}"] = model.learner
        elif model.on_ranks:  # one in a single process may be offloaded
            sections[f"{key}.{TORCH}"] = replace(model.dtensor_cfg, cpu_offload=False)
    for key, section in sections.items():
        yield from section.size_errors(key, counts.learner_devices, uses_ray=counts.uses_ray)
    if isinstance(config, PpoRunConfig) and config.value.head_only and config.policy.dtensor_cfg.pipeline_parallel_size > 1:
        yield Problem(
            "value.head_only",
            "found true, but with policy.dtensor_cfg.pipeline_parallel_size > 1 only the last stage has the hidden states that such a "
            "critic reads",
            "Set it to false, or policy.dtensor_cfg.pipeline_parallel_size=1.",
        )


def check_one_learner(config: TrainingRunConfig) -> Problems:
    """Trained models have one learner; one that only scores may have the torch learner."""
    models: dict[str, WithLearner] = dict(list_trained_models(config))
    if config.policy.uses_torch:
        models |= config.scoring_models
    for name, section in config.policy.learner_sections.items():
        enabled = str(section.enabled).lower()
        for key, model in models.items():
            if name != TORCH and (own := model.learner_sections[name].enabled) != section.enabled:
                yield Problem(
                    f"{key}.{name}.enabled",
                    f"found {str(own).lower()}, but policy.{name}.enabled is {enabled}, and both are on the same ranks",
                    f"Set it to {enabled}. Set policy.backend=torch to train all models with the torch learner, or {section.backend}.",
                )


def check_learner_processes(config: TrainingRunConfig) -> Problems:
    learner = config.policy.learner
    if learner.needs_ranks and config.cluster.backend == "local":
        yield Problem(
            "cluster.backend",
            f"found local, but {learner.title} runs on ranks, which are processes of Ray, also with one device",
            "Set it to auto or ray, or policy.backend=torch.",
        )


def check_torch_engine_devices(config: TrainingRunConfig) -> Problems:
    generation = config.policy.generation
    separate = isinstance(config, RolloutRunConfig) and not generation.colocated.enabled
    if separate and not generation.uses_engines and not count_devices(config).uses_ray:
        yield Problem(
            "policy.generation.colocated.enabled",
            f"found false, but in one process policy.generation.backend {generation.backend} runs on the learner's module",
            "Set policy.generation.colocated.enabled=true, policy.generation.backend=vllm, or cluster.backend=ray.",
        )


def check_engine_size(config: TrainingRunConfig) -> Problems:
    """An engine larger than a node uses whole nodes, with the same number of ranks on each."""
    if not isinstance(config, RolloutRunConfig) or not (counts := count_devices(config)).uses_ray:
        return
    if config.policy.generation.uses_extension:
        return  # its section says where it may be
    size, room, total = counts.engine_size, counts.generating_per_node, counts.generating_per_node * counts.generating_nodes
    options = config.policy.generation.vllm_cfg
    stages = f" x pipeline_parallel_size = {options.pipeline_parallel_size}" if options.pipeline_parallel_size > 1 else ""
    key, found = "policy.generation.vllm_cfg.tensor_parallel_size", f"found {options.tensor_parallel_size}{stages}"
    if size > total:
        yield Problem(
            key,
            f"{found}, but {total} GPU{'s generate' if total > 1 else ' generates'}, {room} of a node",
            f"Set it to {max(1, total // options.pipeline_parallel_size)} or less, or raise cluster.num_nodes or cluster.gpus_per_node, or "
            "let more GPUs generate.",
        )
    elif size > room and size % room:
        yield Problem(
            key,
            f"{found}, but an engine that is larger than a node has as many ranks on each of its nodes, and {room} GPUs of a node generate",
            f"Set it to a size with which an engine has {room} GPUs or fewer, or a multiple of {room}.",
        )


def check_device_numbers(config: TrainingRunConfig) -> Problems:
    """A process of a cluster sees its assigned GPUs, numbered from cuda:0."""
    if not count_devices(config).uses_ray:
        return
    for key, section in iter_sections(config):
        device = getattr(section, "device", None)
        follows_policy = key != "policy" and device == config.policy.device
        if isinstance(device, str) and ":" in device and not follows_policy:
            yield Problem(
                f"{key}.device",
                f"found {device}, but this run uses Ray, which assigns GPUs to each process, numbered from 0 there",
                f"Set it to cuda; CUDA_VISIBLE_DEVICES={device.removeprefix('cuda:')} where Ray starts chooses among the GPUs of a node.",
            )


def check_ray_installed(config: TrainingRunConfig | EvalRunConfig) -> Problems:
    cluster = config.cluster
    if isinstance(config, TrainingRunConfig):
        uses_ray = count_devices(config).uses_ray
    else:
        uses_ray = cluster.backend == "ray" or cluster.num_nodes > 1
    if uses_ray and not packages.is_installed("ray"):
        yield Problem(
            "cluster.backend",
            f"found {cluster.backend} with {cluster.num_nodes} x {cluster.gpus_per_node} devices (cluster.num_nodes, "
            "cluster.gpus_per_node), whose processes are actors of Ray, which is not installed",
            f"Run {packages.install_command('ray')}, or set cluster.backend=local and one device.",
        )


def check_environment_hosts(config: TrainingRunConfig) -> Problems:
    if config.cluster.environment_hosts and not count_devices(config).uses_ray:
        yield Problem(
            "cluster.environment_hosts",
            f"found {config.cluster.environment_hosts}, but environment processes are Ray actors, and this run has no Ray",
            "Set cluster.backend=ray, or set it to 0.",
        )


def check_resources(config: RolloutRunConfig | EvalRunConfig) -> Problems:
    """Check the GPUs of generation, which follow from the number and size of the engines."""
    key, generation = generation_section(config)
    resources, options = generation.colocated.resources, generation.engine_options
    if generation.colocated.enabled or not generation.uses_engines:
        return
    if isinstance(config, RolloutRunConfig) and count_devices(config).uses_ray:
        return  # devices are planned once the cluster is known (strop.distributed.placement)
    size = options.engine_size
    needed = options.num_local_engines * size
    if resources.gpus_per_node not in (None, needed):
        fewer = f"{key}.{generation.engine_key}.num_engines={resources.gpus_per_node // size}"
        fitting = [fewer] if resources.gpus_per_node % size == 0 else []
        yield Problem(
            f"{key}.colocated.resources.gpus_per_node",
            f"found {resources.gpus_per_node}, but {options.num_local_engines} engines of {size} ranks use {needed} GPUs",
            f"Set {' or '.join([*fitting, f'it to {needed} or null'])}.",
        )
    if (resources.num_nodes or 1) > 1:
        yield Problem(
            f"{key}.colocated.resources.num_nodes",
            f"found {resources.num_nodes}, but this run uses one machine",
            "Set it to 1 or null, or raise cluster.num_nodes.",
        )


def warn_unused_roles(config: TrainingRunConfig) -> Problems:
    if count_devices(config).uses_ray:
        return
    for key in changed_keys("cluster.roles", config.cluster.roles):
        yield Problem(key, "it has no effect: this run is one process, without Ray (cluster.backend)")


def warn_idle_devices(config: EvalRunConfig) -> Problems:
    cluster, generation = config.cluster, config.generation
    configured, engines = cluster.num_nodes * cluster.gpus_per_node, count_engines(generation)
    if engines is None and cluster.backend == "local" and not generation.uses_engines:
        engines = 1  # in this process
    if engines is not None and configured > max(1, engines * engine_size(generation)):
        used = f"{engines} {'engine uses' if engines == 1 else 'engines use'} {engines * engine_size(generation)}"
        yield Problem("cluster.gpus_per_node", f"found {configured}, but {used}; the others stay idle")


MACHINE_CHECKS = (
    check_parallel_sizes,
    check_torch_engine_devices,
    check_engine_size,
    check_device_numbers,
    check_ray_installed,
    check_environment_hosts,
)


def find_machine_errors(config: TrainingRunConfig) -> list[Problem]:
    """Return the errors that concern only the machines."""
    sections = [pair for pair in iter_sections(config) if isinstance(pair[1], ClusterConfig | LearnerSection)]
    return [
        *(problem for key, section in sections for problem in section.errors(key)),
        *(problem for check in MACHINE_CHECKS for problem in check(config)),
    ]
