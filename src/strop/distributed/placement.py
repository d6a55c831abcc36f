"""Choose the nodes of a run and the devices for training and generation. Independent of Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


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
    """Devices on one node."""

    node: int  # index among the nodes of the run
    devices: tuple[int, ...]  # indices on the node


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


def _first_device(slot: DeviceSlot) -> tuple[int, int]:
    return slot.node, slot.devices[0]


def plan_devices(
    nodes: int,
    devices: int,
    *,
    engine_size: int,
    engines: int | None,
    colocated: bool,
    engine_devices: int | None = None,
    engine_nodes: int | None = None,
) -> DevicePlan:
    """Divide ``nodes`` x ``devices`` devices between the learner and engines of ``engine_size`` devices.

    Colocated: all devices train, and engines take turns with the learner on them. Otherwise engines have the last ``engine_nodes`` nodes,
    or the last ``engine_devices`` devices of each node. ``engines`` None: as many as fit. An engine never spans nodes.

    Raises PlacementError.
    """
    all_devices = [(node, device) for node in range(nodes) for device in range(devices)]
    if colocated:
        training = generating = all_devices
    else:
        training, generating = _split_devices(all_devices, nodes, devices, engine_devices, engine_nodes)
    engine_slots = _place_engines(generating, engine_size, engines)
    return DevicePlan(tuple(DeviceSlot(node, (device,)) for node, device in training), engine_slots)


def _split_devices(
    all_devices: list[tuple[int, int]], nodes: int, devices: int, engine_devices: int | None, engine_nodes: int | None
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    key = "policy.generation.colocated.resources"
    if engine_nodes is not None and nodes > 1:
        if engine_nodes >= nodes:
            raise PlacementError(
                f"{key}.num_nodes is {engine_nodes} of cluster.num_nodes {nodes}: no node is left to train; lower the first"
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
    """Place each engine on consecutive devices of one node. Raises PlacementError if ``count`` engines do not fit."""
    by_node: dict[int, list[int]] = {}
    for node, device in free:
        by_node.setdefault(node, []).append(device)
    fitting = [
        DeviceSlot(node, tuple(devices[first : first + size]))
        for node, devices in by_node.items()
        for first in range(0, len(devices) - size + 1, size)
    ]
    if not fitting:
        largest = max((len(devices) for devices in by_node.values()), default=0)
        raise PlacementError(
            f"an engine of {size} devices (policy.generation.vllm_cfg.tensor_parallel_size) does not fit on a node: at most {largest} "
            "devices of a node generate. Lower it, or raise cluster.gpus_per_node"
        )
    if count is None:
        return tuple(fitting)
    if count > len(fitting):
        raise PlacementError(
            f"num_engines is {count} (policy.generation.vllm_cfg, or torch_cfg), and {len(fitting)} engines of {size} devices fit; "
            "lower it, or set it to null for as many as fit"
        )
    return tuple(fitting[:count])
