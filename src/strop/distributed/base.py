"""Protocols of objects in other processes and of the cluster that starts them. ``strop.distributed.ray`` implements them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


class ActorDied(RuntimeError):
    """The process of an object died; the message says which process, and why if that is known."""


class NodeLost(ActorDied):
    """The node that a process should start on has left the cluster."""


@dataclass(frozen=True, kw_only=True)
class ActorOptions:
    """Options of the process of an object."""

    name: str  # such as learner-0; used for its log file and in messages
    node: int | None = None  # index of a node of the cluster; None: any node
    devices: tuple[int, ...] = ()  # indices of the node's GPUs that it may use
    kind: Literal["threads", "async"] = "threads"  # calls run one after another, or concurrently on an event loop
    num_cpus: float = 0.0  # reserved
    num_gpus: float = 0.0  # reserved in addition to the node's GPUs, which the whole run shares
    resources: Mapping[str, float] = field(default_factory=dict)  # custom resources of the cluster, reserved
    environment: Mapping[str, str] = field(default_factory=dict)  # environment variables
    packages: Sequence[str] = ()  # pip requirements, installed in addition to the node's packages
    python: str | None = None  # another interpreter, with Strop installed
    working_directory: str | None = None


class RemoteActor(Protocol):
    """An object in another process."""

    name: str
    pid: int | None  # its process id
    address: str  # of its machine

    def call(self, method: str, *arguments: Any, urgent: bool = False, **named: Any) -> Awaitable[Any]:
        """Submit a call immediately; calls run in the order of submission. Await the result. ``urgent``: run concurrently with other calls.

        Raises ActorDied, and what the method raises."""
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
    on_cpu: bool  # whether devices are CPU processes instead of GPUs

    async def spawn(self, options: ActorOptions, make: Callable[..., Any], *arguments: Any) -> RemoteActor:
        """Start a process and make ``make(*arguments)`` in it. Raises ActorDied, and what ``make`` raises."""
        ...

    def spawn_sync(self, options: ActorOptions, make: Callable[..., Any], *arguments: Any) -> RemoteActor:
        """Like ``spawn``, but block this thread."""
        ...

    def put(self, value: Any) -> Any:
        """Store a value for all nodes, once. Return a reference to pass as an argument."""
        ...

    async def close(self) -> None:
        """Kill every process and disconnect."""
        ...
