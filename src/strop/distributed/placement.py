"""Choose the nodes of a run and the devices for training and generation. Independent of Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from strop.distributed.cluster_config import ClusterConfig
from strop.generation.generation_config import GenerationConfig


class PlacementError(ValueError):
    """The requested layout does not fit the available nodes; the message says what was found and what to set."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine of a cluster."""

    id: str
    address: str
    cpus: float
    gpus: int
    domain: str = ""  # NVLink domain; empty: unknown
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceSlot:
    """Devices on one node, or on several for an engine larger than a node."""

    node: int  # index among the nodes of the run
    devices: tuple[int, ...]  # indices on the node
    further: tuple[DeviceSlot, ...] = ()  # the engine's devices on its other nodes

    @property
    def parts(self) -> tuple[DeviceSlot, ...]:
        """The devices of each node, in the order of the engine's ranks."""
        return (DeviceSlot(self.node, self.devices), *self.further)


def choose_nodes(nodes: Sequence[Node], count: int, devices: int, *, on_cpu: bool, segment: int | None = None) -> list[Node]:
    """Choose ``count`` nodes with at least ``devices`` GPUs each, in the order of ranks.

    Nodes of one NVLink domain are adjacent, so that neighbouring ranks are close. ``segment``: every group of ``segment`` consecutive
    nodes is in one domain. Raises PlacementError.
    """
    fitting = [node for node in nodes if on_cpu or node.gpus >= devices]
    if len(fitting) < count:
        available = ", ".join(f"{node.address} ({node.gpus} GPUs, {node.cpus:g} CPUs)" for node in nodes) or "none"
        raise PlacementError(
            f"cluster.num_nodes is {count} and cluster.gpus_per_node {devices}, and {len(fitting)} of the {len(nodes)} nodes in the "
            f"cluster have that many GPUs: {available}. Start more nodes, or lower one of the two"
        )
    domains: dict[str, list[Node]] = {}
    for node in sorted(fitting, key=lambda node: (node.domain, node.address, node.id)):
        domains.setdefault(node.domain or node.id, []).append(node)
    if segment is None:
        largest_first = sorted(domains.values(), key=len, reverse=True)
        return [node for members in largest_first for node in members][:count]
    return _choose_segments(domains, count, segment)


def _choose_segments(domains: Mapping[str, Sequence[Node]], count: int, segment: int) -> list[Node]:
    if count % segment:
        raise PlacementError(
            f"cluster.segment_size {segment} does not divide cluster.num_nodes {count}, and all segments have the same size; change one"
        )
    segments = [
        members[first : first + segment]
        for members in sorted(domains.values(), key=len, reverse=True)
        for first in range(0, len(members) - segment + 1, segment)
    ]
    if len(segments) * segment < count:
        sizes = {name: len(members) for name, members in domains.items()}
        raise PlacementError(
            f"cluster.segment_size {segment}: {count // segment} segments of that many nodes in one NVLink domain are needed, and the "
            f"domains hold {sizes}. The domain of a node is its Ray label {DOMAIN_LABELS[0]} (ray start --labels); lower segment_size, "
            "or set it to null"
        )
    return [node for members in segments[: count // segment] for node in members]


DOMAIN_LABELS = ("strop.nvlink-domain", "ray.io/gpu-domain", "nvidia.com/gpu.clique")


def find_domain(labels: Mapping[str, str]) -> str:
    """Return the NVLink domain that the Ray labels of a node give; empty if they give none."""
    return next((labels[name] for name in DOMAIN_LABELS if labels.get(name)), "")


@dataclass(frozen=True)
class DevicePlan:
    """Which devices train, and which generate."""

    training: tuple[DeviceSlot, ...]  # one device per rank, in rank order
    generation: tuple[DeviceSlot, ...]  # one per engine, with all of its devices

    @property
    def colocated(self) -> bool:
        """Whether engines use training devices."""
        return bool({_first_device(slot) for slot in self.training} & {_first_device(slot) for slot in self.generation})

    @property
    def on_one_machine(self) -> bool:
        """Whether all engines are on the machine of the rank that sends weights."""
        return all(part.node == self.training[0].node for slot in self.generation for part in slot.parts)


def _first_device(slot: DeviceSlot) -> tuple[int, int]:
    return slot.node, slot.devices[0]


@dataclass(frozen=True, kw_only=True)
class DeviceCounts:
    """The devices of a training run. A device is a GPU, or on machines without GPUs a process."""

    nodes: int
    per_node: int
    learner_devices: int = 1  # devices that train, in total
    engine_size: int = 1  # devices of one engine
    engines: int | None = 0  # None: as many as fit; 0: the run does not sample
    engine_devices: int | None = None  # per node, for generation only
    engine_nodes: int | None = None  # whole nodes for generation only
    colocated: bool = True  # engines use the training devices
    uses_ray: bool = False

    @property
    def generating_nodes(self) -> int:
        """The number of nodes with devices that generate."""
        return self.nodes if self.colocated or self.engine_nodes is None or self.nodes == 1 else self.engine_nodes

    @property
    def generating_per_node(self) -> int:
        """The most devices of one node that generate."""
        if self.colocated or (self.engine_nodes is not None and self.nodes > 1):
            return self.per_node
        return self.engine_devices if self.engine_devices is not None else max(1, self.per_node // 2)


def count_section_devices(
    cluster: ClusterConfig, generation: GenerationConfig | None, *, needs_ranks: bool = False
) -> DeviceCounts:
    """Count the devices of a run with these sections. ``generation``: None if it does not sample. ``needs_ranks``: its learner runs on
    ranks, also on a single device."""
    nodes, per_node = cluster.num_nodes, cluster.gpus_per_node
    size, engines = (1, 0) if generation is None else (engine_size(generation), count_engines(generation))
    engine_devices, engine_nodes = (None, None) if generation is None else _generation_only_devices(generation, nodes, per_node)
    learner = (nodes - (engine_nodes or 0)) * (per_node - (engine_devices or 0))
    uses_ray = cluster.backend == "ray" or (cluster.backend == "auto" and (needs_ranks or nodes > 1 or learner > 1))
    return DeviceCounts(
        nodes=nodes,
        per_node=per_node,
        learner_devices=learner if uses_ray else 1,
        engine_size=size,
        engines=engines,
        engine_devices=engine_devices,
        engine_nodes=engine_nodes,
        colocated=generation is None or generation.colocated.enabled,
        uses_ray=uses_ray,
    )


def engine_size(generation: GenerationConfig) -> int:
    return generation.engine_options.engine_size if generation.uses_engines else 1


def count_engines(generation: GenerationConfig) -> int | None:
    return generation.engine_options.num_engines if generation.uses_engines else generation.torch_cfg.num_engines


def _generation_only_devices(generation: GenerationConfig, nodes: int, per_node: int) -> tuple[int | None, int | None]:
    """Return (devices per node, nodes) that only generate."""
    if generation.colocated.enabled:
        return None, None
    resources, engines = generation.colocated.resources, count_engines(generation)
    if nodes > 1 and resources.num_nodes is not None and resources.gpus_per_node in (None, per_node):
        return None, min(resources.num_nodes, nodes)
    requested = resources.gpus_per_node or (-(-(engines * engine_size(generation)) // nodes) if engines else per_node // 2)
    return min(requested, per_node), None


def plan_devices(counts: DeviceCounts, *, on_cpu: bool) -> DevicePlan:
    """Divide the devices between the learner and the engines.

    Colocated: all devices train, and engines take turns with the learner on them. Otherwise engines have the last ``engine_nodes`` nodes,
    or the last ``engine_devices`` devices of each node. ``engines`` None: as many as fit, or one without GPUs. An engine spans
    nodes only if it is larger than one, and then uses all generation devices of its nodes.

    Raises PlacementError.
    """
    all_devices = [(node, device) for node in range(counts.nodes) for device in range(counts.per_node)]
    training, generating = (all_devices, all_devices) if counts.colocated else _split_devices(all_devices, counts)
    engines = 1 if counts.engines is None and on_cpu else counts.engines
    engine_slots = _place_engines(generating, counts.engine_size, engines)
    return DevicePlan(tuple(DeviceSlot(node, (device,)) for node, device in training), engine_slots)


def make_thread_env(
    threads: int | None, plan: DevicePlan, *, on_cpu: bool, generates: bool = False, time_shared: bool = False
) -> dict[str, str]:
    """Return the environment variables that set the CPU threads of a process: ``threads``, or on CPU an equal share of the cores.

    Assumes that every machine has as many cores as this one. ``time_shared``: ranks and engines never compute at the same time, so the
    processes of each kind share all cores."""
    if threads is None and not on_cpu:
        return {}
    same_role = plan.generation if generates else plan.training
    concurrent = same_role if time_shared else (*plan.training, *plan.generation)
    per_node = max(1, sum(part.node == same_role[0].node for slot in concurrent for part in slot.parts))
    return {"OMP_NUM_THREADS": str(threads or max(1, (os.cpu_count() or 1) // per_node))}


def _split_devices(
    all_devices: list[tuple[int, int]], counts: DeviceCounts
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    key = "policy.generation.colocated.resources"
    nodes, devices, engine_devices, engine_nodes = counts.nodes, counts.per_node, counts.engine_devices, counts.engine_nodes
    if engine_nodes is not None and nodes > 1:
        if engine_nodes >= nodes:
            raise PlacementError(
                f"{key}.num_nodes is {engine_nodes} of cluster.num_nodes {nodes}, which leaves no node for training; lower the first"
            )
        reserved = {(node, device) for node, device in all_devices if node >= nodes - engine_nodes}
    else:
        requested = engine_devices if engine_devices is not None else max(1, devices // 2) if devices > 1 else None
        if requested is None or requested >= devices:
            raise PlacementError(
                f"policy.generation.colocated.enabled is false, and generation takes {requested or devices} of cluster.gpus_per_node "
                f"{devices}: none is left to train. Raise cluster.gpus_per_node, lower {key}.gpus_per_node, set {key}.num_nodes if there "
                "are several nodes, or set colocated.enabled=true"
            )
        reserved = {(node, device) for node, device in all_devices if device >= devices - requested}
    return [each for each in all_devices if each not in reserved], [each for each in all_devices if each in reserved]


def _place_engines(free: Sequence[tuple[int, int]], size: int, count: int | None) -> tuple[DeviceSlot, ...]:
    """Place each engine on consecutive devices of one node, or on whole nodes. Raises PlacementError if ``count`` engines do not fit."""
    by_node: dict[int, list[int]] = {}
    for node, device in free:
        by_node.setdefault(node, []).append(device)
    largest = max((len(devices) for devices in by_node.values()), default=0)
    if size > largest:
        fitting = _span_nodes(by_node, size, largest)
    else:
        fitting = [
            DeviceSlot(node, tuple(devices[first : first + size]))
            for node, devices in by_node.items()
            for first in range(0, len(devices) - size + 1, size)
        ]
    if count is None:
        return tuple(fitting)
    if count > len(fitting):
        raise PlacementError(
            f"num_engines is {count} (policy.generation.vllm_cfg, or torch_cfg), and {len(fitting)} engines of {size} devices fit; "
            "lower it, or set it to null for as many as fit"
        )
    return tuple(fitting[:count])


def _span_nodes(by_node: Mapping[int, Sequence[int]], size: int, room: int) -> list[DeviceSlot]:
    """Place engines of ``size`` devices, more than the ``room`` of a node, on consecutive whole nodes. Raises PlacementError."""
    nodes = [DeviceSlot(node, tuple(devices)) for node, devices in by_node.items() if len(devices) == room]
    if not room or size % room or len(nodes) * room < size:
        raise PlacementError(
            f"an engine of {size} devices (policy.generation.vllm_cfg.tensor_parallel_size x pipeline_parallel_size) does not fit: "
            f"{room} devices of a node generate, on {len(nodes)} nodes, and an engine that is larger than a node takes whole nodes. Lower "
            f"it, make it a multiple of {room}, or raise cluster.gpus_per_node or cluster.num_nodes"
        )
    count = size // room
    groups = [nodes[first : first + count] for first in range(0, len(nodes) - count + 1, count)]
    return [DeviceSlot(parts[0].node, parts[0].devices, tuple(parts[1:])) for parts in groups]
