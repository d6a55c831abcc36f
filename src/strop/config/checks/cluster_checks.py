"""Checks of the machines and of parallelism: settings that cannot work, and settings without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from strop.base_config import changed_keys
from strop.config.checks.device_counts import count_devices
from strop.config.schema.distillation_config import TeacherConfig
from strop.config.schema.run_config import (
    DistillationRunConfig,
    EvalRunConfig,
    RolloutRunConfig,
    TrainingRunConfig,
    list_trained_models,
)
from strop.distributed.placement import DeviceCounts
from strop.learner.parallel.dtensor_config import DtensorConfig
from strop.problems import Problem

Problems = Iterator[Problem]


def check_devices(config: TrainingRunConfig) -> Problems:
    counts = count_devices(config)
    if counts.uses_ray and counts.learner_devices < 1:
        yield Problem(
            "policy.generation.colocated.enabled",
            f"found false, and generation would take all {config.cluster.gpus_per_node} devices of each node, which leaves none to train",
            "Raise cluster.gpus_per_node (without GPUs, processes take their place), or lower "
            "policy.generation.colocated.resources.gpus_per_node.",
        )
    if config.cluster.backend == "local" and config.cluster.num_nodes > 1:
        yield Problem(
            "cluster.backend",
            f"found local with cluster.num_nodes = {config.cluster.num_nodes}, but one process runs on one node",
            "Set it to auto or ray.",
        )
    if config.cluster.gpus_per_node < 1:
        yield Problem(
            "cluster.gpus_per_node",
            "found 0, which leaves no device to train",
            "Set it to 1 or more; policy.device=cpu needs no GPU.",
        )


def check_parallel_sizes(config: TrainingRunConfig) -> Problems:
    counts = count_devices(config)
    for key, model in list_trained_models(config):
        yield from _check_model_sizes(f"{key}.dtensor_cfg", model.dtensor_cfg, counts)


def _check_model_sizes(key: str, sizes: DtensorConfig, counts: DeviceCounts) -> Problems:
    tensor, context, copies = sizes.tensor_parallel_size, sizes.context_parallel_size, sizes.dp_replicate_size
    product = tensor * context * copies
    if counts.learner_devices % product:
        where = f"{counts.learner_devices} devices that train" if counts.uses_ray else "the one device of this process"
        yield Problem(
            f"{key}.tensor_parallel_size",
            f"found {tensor}, with context_parallel_size = {context} and dp_replicate_size = {copies}: these {product} ranks do not "
            f"divide {where}",
            f"Raise cluster.gpus_per_node or cluster.num_nodes (a multiple of {product} devices must train), or lower the sizes.",
        )
    if sizes.sequence_parallel and tensor == 1:
        yield Problem(
            f"{key}.sequence_parallel",
            "found true with tensor_parallel_size = 1: there are no ranks to shard the sequence over",
            "Set it to false, or raise tensor_parallel_size.",
        )
    if (experts := sizes.expert_parallel_size) > 1:
        one_copy = max(1, counts.learner_devices // copies)
        if experts % tensor or one_copy % experts:
            yield Problem(
                f"{key}.expert_parallel_size",
                f"found {experts}; it must be a multiple of tensor_parallel_size = {tensor} and divide the {one_copy} ranks of one copy "
                "of the model",
                f"Set it to 1, or to such a number, for instance {one_copy}." if one_copy % tensor == 0 else "Set it to 1.",
            )
    if sizes.cpu_offload and not counts.uses_ray:
        yield Problem(
            f"{key}.cpu_offload",
            "found true, but only a learner on several ranks offloads its parameters, and this run has one",
            "Set it to false, or cluster.backend=ray; policy.reference.offload=true frees the reference policy's memory.",
        )


def check_torch_engine_devices(config: TrainingRunConfig) -> Problems:
    generation = config.policy.generation
    separate = isinstance(config, RolloutRunConfig) and not generation.colocated.enabled
    if separate and generation.backend in ("auto", "torch") and not count_devices(config).uses_ray:
        yield Problem(
            "policy.generation.colocated.enabled",
            f"found false, but in one process policy.generation.backend {generation.backend} runs on the learner's module",
            "Set policy.generation.colocated.enabled=true, policy.generation.backend=vllm, or cluster.backend=ray.",
        )


def check_environment_hosts(config: TrainingRunConfig) -> Problems:
    if config.cluster.environment_hosts and not count_devices(config).uses_ray:
        yield Problem(
            "cluster.environment_hosts",
            f"found {config.cluster.environment_hosts}, but environment processes are Ray actors, and this run has no Ray",
            "Set cluster.backend=ray, or set it to 0.",
        )


def check_teacher_hosts(config: DistillationRunConfig) -> Problems:
    for key, teacher in _list_teachers(config).items():
        if teacher.hosts and not count_devices(config).uses_ray:
            yield Problem(
                f"{key}.hosts",
                f"found {teacher.hosts}, but teacher processes are Ray actors, and this run has no Ray",
                "Set cluster.backend=ray, or set it to 0.",
            )
        if teacher.hosts and teacher.model_name == "self":
            yield Problem(
                f"{key}.hosts",
                f"found {teacher.hosts}, but model_name is self, and a policy that teaches itself runs in the learner",
                "Set it to 0, or name a model.",
            )


def _list_teachers(config: DistillationRunConfig) -> Mapping[str, TeacherConfig]:
    return {"teacher": config.teacher, **{f"teachers.{name}": teacher for name, teacher in config.teachers.items()}}


def check_role_gpus(config: TrainingRunConfig) -> Problems:
    for name, role in (("learner", config.cluster.roles.learner), ("generator", config.cluster.roles.generator)):
        if role.num_gpus is not None:
            yield Problem(
                f"cluster.roles.{name}.num_gpus",
                f"found {role.num_gpus:g}, but its processes use the GPUs of the run (cluster.gpus_per_node)",
                "Remove it.",
            )


def check_segments(config: TrainingRunConfig) -> Problems:
    size, nodes = config.cluster.segment_size, config.cluster.num_nodes
    if size is not None and nodes % size:
        yield Problem(
            "cluster.segment_size",
            f"found {size}, which does not divide cluster.num_nodes = {nodes}; all segments have the same size",
            "Set it to a divisor of cluster.num_nodes, or to null.",
        )


def check_single_machine(config: EvalRunConfig) -> Problems:
    if config.cluster.num_nodes > 1 or config.cluster.backend == "ray":
        yield Problem(
            "cluster.num_nodes",
            f"found {config.cluster.num_nodes} with cluster.backend = {config.cluster.backend}, but an evaluation runs on one machine, "
            "without Ray, in this version",
            "Set cluster.num_nodes=1 and cluster.backend=auto.",
        )


def warn_unused_roles(config: TrainingRunConfig) -> Problems:
    if count_devices(config).uses_ray:
        return
    for key in changed_keys("cluster.roles", config.cluster.roles):
        yield Problem(key, "it has no effect: this run is one process, without Ray (cluster.backend)")


def warn_unused_teacher_role(config: TrainingRunConfig) -> Problems:
    if not count_devices(config).uses_ray or (
        isinstance(config, DistillationRunConfig) and any(teacher.hosts for teacher in _list_teachers(config).values())
    ):
        return
    for key in changed_keys("cluster.roles.teacher", config.cluster.roles.teacher):
        yield Problem(key, "it has no effect: no teacher has its own processes (teacher.hosts)")


def warn_unused_parallel_plan(config: TrainingRunConfig) -> Problems:
    for key, model in list_trained_models(config):
        if model.dtensor_cfg.custom_parallel_plan is not None and model.dtensor_cfg.tensor_parallel_size == 1:
            yield Problem(f"{key}.dtensor_cfg.custom_parallel_plan", "it has no effect: tensor_parallel_size is 1")


CLUSTER_ERROR_CHECKS = (
    check_devices,
    check_parallel_sizes,
    check_torch_engine_devices,
    check_environment_hosts,
    check_role_gpus,
    check_segments,
)
DISTILLATION_ERROR_CHECKS = (check_teacher_hosts,)
CLUSTER_WARNING_CHECKS = (warn_unused_roles, warn_unused_teacher_role, warn_unused_parallel_plan)
