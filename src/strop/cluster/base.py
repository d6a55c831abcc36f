"""An object that lives in another process, as its user sees it. Ray is one way to have such objects (``strop.cluster.ray``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


class HostDied(RuntimeError):
    """The process that an object lived in is gone; the message says which, and what is known of its end."""


class NodeLost(HostDied):
    """The node that a process was to live on has left the cluster."""


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """The process that an object is to live in."""

    name: str  # such as learner-0: of its log file, and in messages
    node: int | None = None  # which of the cluster's nodes, counted from 0; None: any
    devices: tuple[int, ...] = ()  # which of that node's GPUs it sees, counted from 0 on each node
    kind: Literal["threads", "async"] = "threads"  # calls one after another, or all at once on an event loop
    num_cpus: float = 0.0  # reserved
    num_gpus: float = 0.0  # reserved besides those of the node, which belong to the run as a whole
    resources: Mapping[str, float] = field(default_factory=dict)  # the cluster's own kinds, reserved
    environment: Mapping[str, str] = field(default_factory=dict)  # variables
    packages: Sequence[str] = ()  # pip requirements of its own, over those of the node
    python: str | None = None  # an interpreter of its own, with Strop installed in it
    working_directory: str | None = None


class Remote(Protocol):
    """An object in a process of its own."""

    name: str
    process: int | None  # its id, on the machine it runs on
    address: str  # of that machine

    def call(self, method: str, *arguments: Any, urgent: bool = False, **named: Any) -> Awaitable[Any]:
        """Submit a call at once, in the order of submission; await its answer. ``urgent``: beside the call that runs.

        Raises HostDied, and what the method raises."""
        ...

    async def kill(self) -> None:
        """End the process at once; returns when it is gone, as far as that can be told."""
        ...

    @property
    def alive(self) -> bool:
        """Whether nothing is known of its end."""
        ...

    def wait(self, method: str, *arguments: Any, urgent: bool = False) -> Callable[[], Any]:
        """Submit a call; the answer is waited for, with everything else standing still, when the result is called. Raises as ``call``."""
        ...


class Cluster(Protocol):
    """Makes processes on its nodes."""

    nodes: int
    devices_per_node: int
    on_cpu: bool  # devices are processes that stand for GPUs

    async def host(self, options: HostOptions, make: Callable[..., Any], *arguments: Any) -> Remote:
        """``make(*arguments)``, in a process of its own. Raises HostDied, and what ``make`` raises."""
        ...

    def host_now(self, options: HostOptions, make: Callable[..., Any], *arguments: Any) -> Remote:
        """As ``host``, with everything in this process standing still meanwhile."""
        ...

    def share(self, value: Any) -> Any:
        """Put something where every node finds it, once; a reference, to be given as an argument."""
        ...

    async def close(self) -> None:
        """End every process."""
        ...
