"""The cluster on Ray. The only module that imports Ray.

A placement group reserves one bundle on every node of the run (``strop.cluster.placement`` chooses them). In each bundle, a
``NodeReservation`` actor holds the node's GPUs for the whole run. The run's processes select GPUs by ``CUDA_VISIBLE_DEVICES``, so that
learner and engine can take turns on one device.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # otherwise Ray writes a token file to the home folder
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray lowers the priority of its processes by default
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # processes set their own CUDA_VISIBLE_DEVICES

import ray as ray_package
from ray import exceptions
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from strop.cluster.base import HostDied, HostOptions, NodeLost, Remote
from strop.cluster.guardian import Guardian
from strop.cluster.placement import Node, PlacementError, choose_nodes, domain_of

log = logging.getLogger(__name__)
ray: Any = ray_package  # Ray's decorators are not typed

POLL = 0.05  # seconds between checks whether a process has ended
KILL_SECONDS = 10.0
OWN_CLUSTER = {"gcs_rpc_server_reconnect_timeout_s": 10}  # default: 60; on a local cluster nothing restarts a server that died
CONCURRENCY = 100_000  # concurrent calls of an actor on an event loop


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The nodes of a run."""

    nodes: int = 1
    devices_per_node: int = 1
    on_cpu: bool | None = True  # None: True if no node has GPUs
    segment: int | None = None  # consecutive nodes that must be in one NVLink domain
    address: str | None = None  # of a running cluster; None: that of RAY_ADDRESS or `ray start`, else a new one on this machine
    output: Path | None = None  # folder on a shared disk for the output of processes, one file each
    wait_seconds: float = 120.0  # for nodes to join
    cpus_per_node: float = 1.0  # reserved on each node


class RayCluster:
    """A ``Cluster`` of Ray actors. Created by ``connect``."""

    def __init__(
        self,
        options: ClusterOptions,
        nodes: Sequence[Node],
        group: Any,
        keepers: Sequence[Any],
        guardian: Guardian | None,
    ) -> None:
        self.options = options
        self.members = tuple(nodes)
        self.nodes = len(nodes)
        self.devices_per_node = options.devices_per_node
        self.on_cpu = bool(options.on_cpu)
        self._group = group
        self._keepers = tuple(keepers)
        self._gpus: list[list[str]] = [] if options.on_cpu else ray.get([keeper.gpus.remote() for keeper in keepers])
        self.owned = guardian is not None  # started by connect, and ends with this process
        self._guardian = guardian
        self._hosts: list[RayRemote] = []

    async def host(self, options: HostOptions, make: Callable[..., Any], *arguments: Any) -> Remote:
        remote = self._begun(options)
        try:
            remote.process, remote.address = await self._begins(remote, options)
            await remote.ask("make", make, *arguments)
        except BaseException:
            await remote.kill()
            self._hosts.remove(remote)
            raise
        return remote

    async def _begins(self, remote: RayRemote, options: HostOptions) -> Any:
        """Wait until the actor runs. Return its process id and address. Raises PlacementError if Ray finds no GPUs for it."""
        try:
            return await asyncio.wait_for(remote.ask("about"), self._patience(options))
        except TimeoutError:
            raise self._no_gpus(options) from None

    def host_now(self, options: HostOptions, make: Callable[..., Any], *arguments: Any) -> Remote:
        remote = self._begun(options)
        try:
            remote.process, remote.address = remote.ask_now("about", timeout=self._patience(options))
        except exceptions.GetTimeoutError:
            raise self._no_gpus(options) from None
        remote.ask_now("make", make, *arguments)
        return remote

    def _patience(self, options: HostOptions) -> float | None:
        """Return the timeout in seconds for an actor with GPUs besides those of the run, which may never be free; None for others."""
        return self.options.wait_seconds if options.num_gpus else None

    def _no_gpus(self, options: HostOptions) -> PlacementError:
        return PlacementError(
            f"{options.name} needs {options.num_gpus:g} GPUs besides those of the run, and no node had them free within "
            f"{self.options.wait_seconds:g} s (cluster.wait_seconds); free: {ray.available_resources()}. Add a node, lower "
            "cluster.gpus_per_node so that the run leaves some, or let processes share one (num_gpus of their role in cluster.roles)"
        )

    def _begun(self, options: HostOptions) -> RayRemote:
        """Submit the start of an actor, without waiting for it. Raises NodeLost."""
        if options.node is not None and not self.node_lives(options.node):
            node = self.members[options.node]
            raise NodeLost(f"{options.name} cannot start: its node {node.address} has left the cluster")
        kind = ASYNC_HOST if options.kind == "async" else THREAD_HOST
        output = None if self.options.output is None else str(self.options.output / f"{options.name}.log")
        actor = kind.options(**self._actor_options(options)).remote(options.name, output)
        remote = RayRemote(options.name, actor)
        self._hosts.append(remote)
        return remote

    def _actor_options(self, options: HostOptions) -> dict[str, Any]:
        variables = dict(options.environment)
        if not self.options.on_cpu and not options.num_gpus:  # otherwise Ray chooses the GPUs
            held = self._gpus[options.node or 0]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(held[device] for device in options.devices)
        environment: dict[str, Any] = {"env_vars": {name: str(value) for name, value in variables.items()}}
        if options.packages:
            environment["pip"] = list(options.packages)
        if options.python:
            environment["py_executable"] = options.python
        if options.working_directory:
            environment["working_dir"] = options.working_directory
        chosen: dict[str, Any] = {
            "num_cpus": options.num_cpus,
            "num_gpus": options.num_gpus,
            "resources": dict(options.resources),
            "max_restarts": 0,
            "runtime_env": environment,
        }
        if options.kind == "async":
            chosen["max_concurrency"] = CONCURRENCY
        if options.node is not None:
            chosen["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=options.node, placement_group_capture_child_tasks=False
            )
        return chosen

    def share(self, value: Any) -> Any:
        return ray.put(value)

    def node_lives(self, place: int) -> bool:
        return self.members[place].id in {node["NodeID"] for node in ray.nodes() if node["Alive"]}

    async def close(self) -> None:
        await asyncio.gather(*(host.kill() for host in self._hosts), return_exceptions=True)
        self._hosts.clear()
        for keeper in self._keepers:
            ray.kill(keeper)
        with suppress(Exception):  # the cluster itself may have died
            remove_placement_group(self._group)
        await asyncio.to_thread(ray.shutdown)
        if self._guardian is not None:
            await asyncio.to_thread(self._guardian.close)


class RayRemote:
    """An object in a Ray actor."""

    process: int | None

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.process = None
        self.address = ""
        self._actor = actor
        self._ended = False

    @property
    def alive(self) -> bool:
        return not self._ended

    def submit(self, method: str, *arguments: Any, urgent: bool = False, **named: Any) -> Any:
        return (self._actor.urgent if urgent else self._actor.call).remote(method, *arguments, **named)

    def call(self, method: str, *arguments: Any, urgent: bool = False, **named: Any) -> Awaitable[Any]:
        return self._answer(self.submit(method, *arguments, urgent=urgent, **named))

    def ask(self, what: str, *arguments: Any) -> Awaitable[Any]:
        """Call a method of the actor itself, not of the object that it holds: ``get_pid_and_address`` or ``make``."""
        return self._answer(getattr(self._actor, what).remote(*arguments))

    def ask_now(self, what: str, *arguments: Any, timeout: float | None = None) -> Any:
        with self._errors():
            return ray.get(getattr(self._actor, what).remote(*arguments), timeout=timeout)

    def wait(self, method: str, *arguments: Any, urgent: bool = False) -> Callable[[], Any]:
        reference = self.submit(method, *arguments, urgent=urgent)

        def answer() -> Any:
            with self._errors():
                return ray.get(reference)

        return answer

    async def _answer(self, reference: Any) -> Any:
        with self._errors():
            return await reference

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Translate Ray's errors: raise the original exception of the other process, or ActorDied if the process has died."""
        try:
            yield
        except exceptions.RayTaskError as error:
            raise _cause(error) from None
        except (exceptions.RayActorError, exceptions.NodeDiedError, exceptions.ObjectLostError) as error:
            self._ended = True
            where = f"process {self.process}, on {self.address or 'no node yet'}"
            raise HostDied(f"{self.name} ({where}) died: {_reason(error)}") from error

    async def kill(self) -> None:
        self._ended = True
        with suppress(Exception):
            ray.kill(self._actor, no_restart=True)
        if self.process is None or self.address != own_address():
            return
        deadline = time.monotonic() + KILL_SECONDS
        while process_lives(self.process):
            if time.monotonic() > deadline:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(self.process, signal.SIGKILL)
                return
            await asyncio.sleep(POLL)


def _cause(error: exceptions.RayTaskError) -> BaseException:
    """Return the exception raised in the other process, with its traceback as a note."""
    cause = error.cause
    if not isinstance(cause, BaseException):
        return error
    if not getattr(cause, "__notes__", None):
        cause.add_note(f"raised in another process:\n{str(error).strip()}")
    return cause


def _reason(error: Exception) -> str:
    """Return the line of Ray's message that gives the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(_NO_REASON)]
    return (told or lines or [type(error).__name__])[0][:300]


_NO_REASON = ("class_name", "actor_id", "pid", "name", "namespace", "ip", "The actor died", "The actor is dead")


def process_lives(process: int) -> bool:
    """Return whether a process on this machine runs; False for a zombie."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def own_address() -> str:
    return str(ray.util.get_node_ip_address())


# --- in the actors' processes ----------------------------------------------------------------------------------------------------------


class ThreadHost:
    """Holds one object and calls its methods one after another; urgent calls run concurrently with them."""

    def __init__(self, name: str, output: str | None) -> None:
        _begin(name, output)
        self._object: Any = None

    def about(self) -> tuple[int, str]:
        return os.getpid(), own_address()

    def make(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._object = make(*arguments)

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self._object, method)(*arguments, **named)

    urgent = ray.method(concurrency_group="urgent")(call)


class AsyncHost:
    """Holds one object and calls its methods concurrently on an event loop."""

    def __init__(self, name: str, output: str | None) -> None:
        _begin(name, output)
        self._object: Any = None

    async def about(self) -> tuple[int, str]:
        return os.getpid(), own_address()

    async def make(self, make: Callable[..., Any], *arguments: Any) -> None:
        made = make(*arguments)
        self._object = await made if isinstance(made, Awaitable) else made

    async def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        answer = getattr(self._object, method)(*arguments, **named)
        return await answer if isinstance(answer, Awaitable) else answer

    urgent = call


class Keeper:
    """Holds the GPUs of a node for the run."""

    def gpus(self) -> list[str]:
        return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


THREAD_HOST: Any = ray.remote(num_cpus=0, concurrency_groups={"urgent": 2})(ThreadHost)
ASYNC_HOST: Any = ray.remote(num_cpus=0)(AsyncHost)
KEEPER: Any = ray.remote(num_cpus=0)(Keeper)


def _begin(name: str, output: str | None) -> None:
    if output is not None:
        _write_to(Path(output))
    with suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(f"strop {name}")


def _write_to(path: Path) -> None:
    """Redirect stdout, stderr and the log of this process to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)


# --- connecting ------------------------------------------------------------------------------------------------------------------------


async def connect(options: ClusterOptions) -> RayCluster:
    """Connect to the running cluster, or start one on this machine, and reserve nodes. Raises PlacementError, ConnectionError."""
    guardian = await asyncio.to_thread(_join, options)
    try:
        if options.on_cpu is None:
            options = replace(options, on_cpu=not any(node.gpus for node in nodes_of_cluster()))
        nodes = await _chosen(options)
        group = await _reserved(options, nodes)
        keepers = []
        for place in range(len(nodes)):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)
            gpus = 0 if options.on_cpu else options.devices_per_node
            keepers.append(KEEPER.options(num_gpus=gpus, scheduling_strategy=strategy).remote())
        return RayCluster(options, nodes, group, keepers, guardian)
    except BaseException:
        ray.shutdown()
        if guardian is not None:
            guardian.close()
        raise


def _join(options: ClusterOptions) -> Guardian | None:
    """Connect to the running cluster, or start one on this machine and return the guardian that ends it with this process.

    Raises ConnectionError, and RuntimeError if this process is already connected."""
    if ray.is_initialized():
        raise RuntimeError(
            "this process is already connected to a Ray cluster; disconnect with ray.shutdown() before starting a run"
        )
    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that it cannot handle signals, which the run handles itself
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    running = options.address or os.environ.get("RAY_ADDRESS") or _started_here()
    if running and running != "local":
        try:
            _knock(running)
            ray.init(address=running, **quiet)
        except OSError as error:  # ConnectionError is one
            raise ConnectionError(
                f"no Ray cluster answers at {running} ({error}): start it (ray start --head; on other nodes ray start --address=...), or "
                "unset cluster.address and RAY_ADDRESS to start one on this machine"
            ) from error
        return None
    gpus = 0 if options.on_cpu else None
    cpus = max(os.cpu_count() or 1, int(options.cpus_per_node) + 1)
    guardian = Guardian()
    try:
        with guardian.marking():
            ray.init(address="local", num_cpus=cpus, num_gpus=gpus, include_dashboard=False, _system_config=OWN_CLUSTER, **quiet)
    except Exception as error:  # Ray raises plain Exception here
        guardian.close()
        raise ConnectionError(f"a Ray cluster could not be started on this machine: {error}") from error
    return guardian


def _knock(address: str) -> None:
    """Raise OSError if nothing listens at host:port. Ray itself would retry for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():  # otherwise a keyword of Ray, such as auto
        socket.create_connection((host, int(port)), timeout=10).close()


def _started_here() -> str | None:
    """Return the address of a cluster that `ray start` started on this machine, if it still answers."""
    path = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        host, _, port = path.read_text().strip().rpartition(":")
        with socket.create_connection((host, int(port)), timeout=2):
            return f"{host}:{port}"
    except (OSError, ValueError):
        return None


def nodes_of_cluster() -> list[Node]:
    """Return the nodes that are alive now."""
    return [
        Node(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            cpus=float(node["Resources"].get("CPU", 0)),
            gpus=int(node["Resources"].get("GPU", 0)),
            domain=domain_of(node.get("Labels") or {}),
            labels=node.get("Labels") or {},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


async def _chosen(options: ClusterOptions) -> list[Node]:
    """Wait until enough nodes have joined, and choose those of the run. Raises PlacementError after ``wait_seconds``."""
    deadline = time.monotonic() + options.wait_seconds
    while True:
        try:
            return choose_nodes(
                nodes_of_cluster(), options.nodes, options.devices_per_node, on_cpu=bool(options.on_cpu), segment=options.segment
            )
        except PlacementError:
            if options.nodes == 1 or time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.5)


async def _reserved(options: ClusterOptions, nodes: Sequence[Node]) -> Any:
    """Reserve a bundle on each node. Return the placement group. Raises PlacementError if the resources do not become free in time."""
    bundle = {"CPU": options.cpus_per_node} | ({} if options.on_cpu else {"GPU": float(options.devices_per_node)})
    group = placement_group(
        [dict(bundle) for _ in nodes],
        strategy="PACK",
        bundle_label_selector=[{"ray.io/node-id": node.id} for node in nodes],
    )
    try:
        await asyncio.wait_for(group.ready(), options.wait_seconds)
    except TimeoutError:
        remove_placement_group(group)
        raise PlacementError(
            f"{bundle} on each of {', '.join(node.address for node in nodes)} could not be reserved within {options.wait_seconds:g} s "
            f"(cluster.wait_seconds): another run holds them; free: {ray.available_resources()}"
        ) from None
    return group


async def on_every_node(make: Callable[..., Any], *arguments: Any) -> list[tuple[Node, Any]]:
    """Run ``make(*arguments)`` once on each node of the connected cluster. Return (node, result or exception) for each."""

    task: Any = ray.remote(num_cpus=0, max_retries=0)(_called)

    async def one(node: Node) -> tuple[Node, Any]:
        strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
        try:
            return node, await task.options(scheduling_strategy=strategy).remote(make, *arguments)
        except exceptions.RayTaskError as error:
            return node, _cause(error)
        except exceptions.RayError as error:
            return node, error

    return list(await asyncio.gather(*(one(node) for node in nodes_of_cluster())))


def _called(make: Callable[..., Any], *arguments: Any) -> Any:
    return make(*arguments)
