"""Protocols of objects in other processes and of the cluster that starts them. ``strop.distributed.ray`` implements them."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from strop.base_config import validate_section
from strop.distributed.cluster_config import RoleConfig


class ActorDied(RuntimeError):
    """The process of an object died; the message says which process, and why if that is known."""


class NodeLost(ActorDied):
    """The node that a process should start on has left the cluster."""


DEFAULT_ROLE = validate_section(RoleConfig, {})

ActorKind = Literal["threads", "async"]
"""Calls run one after another, or concurrently on an event loop."""


@dataclass(frozen=True, kw_only=True)
class ActorOptions:
    """Options for starting an object's process."""

    name: str  # such as learner-0; used for its log file and in messages
    role: RoleConfig = DEFAULT_ROLE  # its resources, environment variables, packages and interpreter
    node: int | None = None  # index of a node of the cluster; None: any node
    further_nodes: tuple[int, ...] = ()  # further nodes, for processes that it starts itself
    devices: tuple[int, ...] = ()  # indices of the node's GPUs that it may use
    kind: ActorKind = "threads"
    num_gpus: float = 0.0  # reserved in addition to the node's GPUs, which the whole run shares
    environment: Mapping[str, str] = field(default_factory=dict)  # environment variables, unless the role sets them


def spread_over_nodes(
    names: Sequence[str],
    num_nodes: int,
    role: RoleConfig,
    environment: Mapping[str, str],
    *,
    num_gpus: float = 0.0,
    kind: ActorKind = "threads",
    first: int = 0,
) -> list[ActorOptions]:
    """Return the options of processes without GPUs of the run, one after another on the nodes from the ``first`` one on.

    Processes with ``num_gpus`` are on any node that has them free."""
    nodes = [None if num_gpus else (first + number) % num_nodes for number in range(len(names))]
    return [
        ActorOptions(name=name, role=role, node=node, kind=kind, num_gpus=num_gpus, environment=environment)
        for name, node in zip(names, nodes, strict=True)
    ]


class RemoteActor(Protocol):
    """An object in another process."""

    name: str
    pid: int | None  # its process id
    address: str  # of its machine

    def call(self, method: str, *arguments: Any, urgent: bool = False, **named: Any) -> Awaitable[Any]:
        """Submit a call immediately; calls run in the order of submission. Await the result. ``urgent``: run concurrently with other calls.

        Raises ActorDied, and what the method raises."""
        ...

    def control_profile(self, what: str, operators: bool = False) -> Awaitable[Any]:
        """Call ``strop.monitoring.process_profile.control_profile`` there, concurrently with other calls."""
        ...

    async def kill(self) -> None:
        """Kill the process. Return when it has ended; for a process on another machine, without waiting."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the process is not known to have ended."""
        ...

    def start_call(self, method: str, *arguments: Any, urgent: bool = False) -> Callable[[], Any]:
        """Submit a call. Return a function that blocks until the result is available and returns it. It raises what ``call`` raises."""
        ...


class Cluster(Protocol):
    """Starts processes on the nodes of a run."""

    num_nodes: int
    devices_per_node: int
    address: str  # for processes that connect to it themselves
    on_cpu: bool  # whether devices are CPU processes instead of GPUs

    async def spawn(self, options: ActorOptions, make: Callable[..., Any], *arguments: Any) -> RemoteActor:
        """Start a process and create ``make(*arguments)`` in it. Raises ActorDied, and any error of ``make``."""
        ...

    def spawn_sync(self, options: ActorOptions, make: Callable[..., Any], *arguments: Any) -> RemoteActor:
        """Like ``spawn``, but block this thread."""
        ...

    def locate(self, node: int, devices: Sequence[int]) -> tuple[str, tuple[str, ...]]:
        """Return the id of a node and the names of devices there, for an object that starts processes on several nodes itself."""
        ...

    def put(self, value: Any) -> Any:
        """Store a value for all nodes, once. Return a reference to pass as an argument."""
        ...

    def list_processes(self) -> Sequence[RemoteActor]:
        """Return the processes that are not known to have ended."""
        ...

    async def close(self) -> None:
        """Kill every process and disconnect."""
        ...


def serve_store(host: str, world: int, timeout: float) -> Any:
    """Serve a TCPStore on ``host``, this node's cluster address. The store's own listener would be on every interface."""
    import torch.distributed

    distributed: Any = torch.distributed
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=max(128, world))
    limit, port = datetime.timedelta(seconds=timeout), listener.getsockname()[1]
    return distributed.TCPStore(
        host, port, world, True, timeout=limit, wait_for_workers=False, master_listen_fd=listener.detach()
    )
