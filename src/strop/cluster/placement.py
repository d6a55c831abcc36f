"""Which nodes a run takes, and which devices each of its roles has. Plain arithmetic: nothing here knows Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class PlacementError(ValueError):
    """What was asked for does not fit the nodes there are; the message says what was found and what to set."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine of a cluster."""

    id: str
    address: str
    cpus: float
    gpus: int
    domain: str = ""  # nodes of one NVLink domain have the same; empty: a domain of its own is not known
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Devices on one node."""

    node: int  # counted from 0, among the run's nodes
    devices: tuple[int, ...]  # counted from 0 on each node


def choose_nodes(nodes: Sequence[Node], count: int, devices: int, *, on_cpu: bool, segment: int | None = None) -> list[Node]:
    """``count`` nodes with ``devices`` GPUs each, in the order of ranks. With ``segment``, each run of so many nodes lies in one domain.

    Nodes of one domain come together, so that ranks next to each other are near each other. Raises PlacementError.
    """
    fitting = [node for node in nodes if on_cpu or node.gpus >= devices]
    if len(fitting) < count:
        found = ", ".join(f"{node.address} ({node.gpus} GPUs, {node.cpus:g} CPUs)" for node in nodes) or "none"
        raise PlacementError(
            f"cluster.num_nodes is {count} and cluster.gpus_per_node {devices}, and {len(fitting)} of the {len(nodes)} nodes there "
            f"have as many: {found}. Start more nodes, or lower one of the two"
        )
    domains: dict[str, list[Node]] = {}
    for node in sorted(fitting, key=lambda node: (node.domain, node.address, node.id)):
        domains.setdefault(node.domain or node.id, []).append(node)
    if segment is None:
        largest_first = sorted(domains.values(), key=len, reverse=True)
        return [node for members in largest_first for node in members][:count]
    return _in_segments(domains, count, segment)


def _in_segments(domains: Mapping[str, Sequence[Node]], count: int, segment: int) -> list[Node]:
    if count % segment:
        raise PlacementError(
            f"cluster.segment_size {segment} does not divide cluster.num_nodes {count}: each segment has as many nodes; change one"
        )
    segments = [
        members[first : first + segment]
        for members in sorted(domains.values(), key=len, reverse=True)
        for first in range(0, len(members) - segment + 1, segment)
    ]
    if len(segments) * segment < count:
        sizes = {name: len(members) for name, members in domains.items()}
        raise PlacementError(
            f"cluster.segment_size {segment}: {count // segment} segments of as many nodes in one NVLink domain are needed, and the "
            f"domains hold {sizes}. Nodes say their domain by the Ray label {DOMAIN_LABELS[0]} (ray start --labels); lower segment_size, "
            "or set it to null"
        )
    return [node for members in segments[: count // segment] for node in members]


DOMAIN_LABELS = ("strop.nvlink-domain", "ray.io/gpu-domain", "nvidia.com/gpu.clique")


def domain_of(labels: Mapping[str, str]) -> str:
    return next((labels[name] for name in DOMAIN_LABELS if labels.get(name)), "")


@dataclass(frozen=True)
class Division:
    """Which devices train, and which generate."""

    training: tuple[Place, ...]  # one device each: rank r is the r-th
    generation: tuple[Place, ...]  # one for each engine, with all of its devices

    @property
    def shared(self) -> bool:
        """Whether engines are on devices that train."""
        return bool({_key(place) for place in self.training} & {_key(place) for place in self.generation})


def _key(place: Place) -> tuple[int, int]:
    return place.node, place.devices[0]


def divide(
    nodes: int,
    devices: int,
    *,
    engine_size: int,
    engines: int | None,
    colocated: bool,
    engine_devices: int | None = None,
    engine_nodes: int | None = None,
) -> Division:
    """Devices of ``nodes`` x ``devices`` between learner and engines.

    Colocated: all devices train, and engines of ``engine_size`` devices take them in turns. Apart: engines have ``engine_nodes`` whole
    nodes, the last ones, or on one node ``engine_devices`` of it, the last ones. ``engines`` None: as many as fit. An engine never spans
    nodes unless it is larger than one. Raises PlacementError.
    """
    every = [(node, device) for node in range(nodes) for device in range(devices)]
    if colocated:
        training = generating = every
    else:
        training, generating = _apart(every, nodes, devices, engine_devices, engine_nodes)
    places = _engines(generating, engine_size, engines)
    return Division(tuple(Place(node, (device,)) for node, device in training), places)


def _apart(
    every: list[tuple[int, int]], nodes: int, devices: int, engine_devices: int | None, engine_nodes: int | None
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    key = "policy.generation.colocated.resources"
    if engine_nodes is not None and nodes > 1:
        if engine_nodes >= nodes:
            raise PlacementError(
                f"{key}.num_nodes is {engine_nodes} of cluster.num_nodes {nodes}: none is left to train; lower the first"
            )
        taken = {(node, device) for node, device in every if node >= nodes - engine_nodes}
    else:
        wanted = engine_devices if engine_devices is not None else max(1, devices // 2) if devices > 1 else None
        if wanted is None or wanted >= devices:
            raise PlacementError(
                f"policy.generation.colocated.enabled is false, and of cluster.gpus_per_node {devices} generation would have "
                f"{wanted or devices}: none is left to train. Raise cluster.gpus_per_node, set {key}.gpus_per_node to less, or "
                f"with several nodes {key}.num_nodes, or set colocated.enabled=true"
            )
        taken = {(node, device) for node, device in every if device >= devices - wanted}
    return [place for place in every if place not in taken], [place for place in every if place in taken]


def _engines(free: Sequence[tuple[int, int]], size: int, count: int | None) -> tuple[Place, ...]:
    """Engines on consecutive devices of one node each; more engines than fit share devices from the first on, on a CPU."""
    by_node: dict[int, list[int]] = {}
    for node, device in free:
        by_node.setdefault(node, []).append(device)
    fitting = [
        Place(node, tuple(devices[first : first + size]))
        for node, devices in by_node.items()
        for first in range(0, len(devices) - size + 1, size)
    ]
    if not fitting:
        largest = max((len(devices) for devices in by_node.values()), default=0)
        raise PlacementError(
            f"an engine of {size} devices (policy.generation.vllm_cfg.tensor_parallel_size) fits no node: at most {largest} of one node "
            "may generate. Lower it, or raise cluster.gpus_per_node"
        )
    if count is None:
        return tuple(fitting)
    if count > len(fitting):
        raise PlacementError(
            f"num_engines is {count} (policy.generation.vllm_cfg, or torch_cfg), and {len(fitting)} engines of {size} devices fit; "
            "lower it, or set it to null for as many as fit"
        )
    return tuple(fitting[:count])
