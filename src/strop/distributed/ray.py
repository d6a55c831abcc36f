"""The cluster on Ray. The only module that imports Ray.

A placement group reserves one bundle on every node of the run (``strop.distributed.placement`` chooses them). In each bundle, a
``NodeReservation`` actor holds the node's GPUs for the whole run. The run's processes select GPUs by ``CUDA_VISIBLE_DEVICES``, so that
learner and engine can take turns on one device.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import stat
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray lowers the priority of its processes by default
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # processes set their own CUDA_VISIBLE_DEVICES

import ray as ray_package
from ray import exceptions
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from strop.data.sources.local_copies import COPIES_VARIABLE, copies_folder
from strop.determinism import deterministic_variables
from strop.distributed.base import ActorDied, ActorOptions, NodeLost, RemoteActor
from strop.distributed.cluster_config import ClusterConfig
from strop.distributed.guardian import Guardian
from strop.distributed.placement import Node, PlacementError, choose_nodes, find_domain
from strop.monitoring.process_profile import RECORDER, control_profile
from strop.openmp import openmp_variables
from strop.safety.remote_code import TRUST_VARIABLE, trusts_remote_code

log = logging.getLogger(__name__)
ray: Any = ray_package  # Ray's decorators are not typed

AUTH_CHOSEN = "RAY_AUTH_MODE" in os.environ  # by the user
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # of a cluster started by someone else
TOKEN = secrets.token_hex(32)  # of the clusters that this process starts
POLL_SECONDS = 0.05  # seconds between checks whether a process has ended
KILL_SECONDS = 10.0  # seconds until a process that does not end gets SIGKILL
LOCAL_CLUSTER_CONFIG = {
    "gcs_rpc_server_reconnect_timeout_s": 10,  # default: 60; on a local cluster nothing restarts a server that died
    "prestart_worker_first_driver": False,  # one process per core, which the run would not use
}
MAX_CONCURRENCY = 100_000  # concurrent calls of an actor on an event loop


class RayCluster:
    """A ``Cluster`` of Ray actors. Created by ``connect``."""

    def __init__(
        self,
        config: ClusterConfig,
        nodes: Sequence[Node],
        group: Any,
        reservations: Sequence[Any],
        guardian: Guardian | None,
        *,
        on_cpu: bool,
        output_folder: Path | None,
    ) -> None:
        self.config = config
        self.members = tuple(nodes)
        self.num_nodes = len(nodes)
        self.devices_per_node = config.gpus_per_node
        self.on_cpu = on_cpu
        self.output_folder = output_folder
        self._group = group
        self._reservations = tuple(reservations)
        self._gpus: list[list[str]] = [] if on_cpu else ray.get([reservation.gpu_ids.remote() for reservation in reservations])
        self.address = str(ray.get_runtime_context().gcs_address)
        self.started_here = guardian is not None  # started by connect; ends with this process
        self._guardian = guardian
        self._actors: list[RayActor] = []

    async def spawn(self, options: ActorOptions, make: Callable[..., Any], *arguments: Any) -> RemoteActor:
        remote = self._start_actor(options)
        try:
            remote.pid, remote.address = await self._wait_for_start(remote, options)
            await remote.call_actor("make", make, *arguments)
        except BaseException:
            await remote.kill()
            self._actors.remove(remote)
            raise
        return remote

    async def _wait_for_start(self, remote: RayActor, options: ActorOptions) -> Any:
        """Wait until the actor runs. Return its process id and address. Raises PlacementError if Ray finds no GPUs for it."""
        try:
            return await asyncio.wait_for(remote.call_actor("get_pid_and_address"), self._start_timeout(options))
        except TimeoutError:
            raise self._no_gpus_error(options) from None

    def spawn_sync(self, options: ActorOptions, make: Callable[..., Any], *arguments: Any) -> RemoteActor:
        remote = self._start_actor(options)
        try:
            remote.pid, remote.address = remote.call_actor_sync("get_pid_and_address", timeout=self._start_timeout(options))
        except exceptions.GetTimeoutError:
            raise self._no_gpus_error(options) from None
        remote.call_actor_sync("make", make, *arguments)
        return remote

    def _start_timeout(self, options: ActorOptions) -> float | None:
        """Return the timeout in seconds for an actor that needs GPUs beyond the run's, which may never be free; None for others."""
        return self.config.wait_seconds if options.num_gpus else None

    def _no_gpus_error(self, options: ActorOptions) -> PlacementError:
        return PlacementError(
            f"{options.name} needs {options.num_gpus:g} GPUs in addition to the run's, and no node had them free within "
            f"{self.config.wait_seconds:g} s (cluster.wait_seconds); free: {ray.available_resources()}. Add a node, lower "
            "cluster.gpus_per_node so that the run leaves some, or let processes share one (num_gpus of their role in cluster.roles)"
        )

    def _start_actor(self, options: ActorOptions) -> RayActor:
        """Submit the start of an actor, without waiting for it. Raises NodeLost."""
        for index in () if options.node is None else (options.node, *options.further_nodes):
            if not self.is_node_alive(index):
                raise NodeLost(f"{options.name} cannot start: its node {self.members[index].address} has left the cluster")
        actor_class = ASYNC_ACTOR if options.kind == "async" else THREAD_ACTOR
        output = None if self.output_folder is None else str(self.output_folder / f"{options.name}.log")
        actor = actor_class.options(**self._actor_options(options)).remote(options.name, output)
        remote = RayActor(options.name, actor)
        self._actors.append(remote)
        return remote

    def _actor_options(self, options: ActorOptions) -> dict[str, Any]:
        settings = {**openmp_variables(), **deterministic_variables()}
        role, variables = options.role, {**settings, **options.environment, **options.role.env_vars}
        if not self.on_cpu and not options.num_gpus:  # otherwise Ray chooses the GPUs
            gpus = self._gpus[options.node or 0]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[device] for device in options.devices)
        if trusts_remote_code():
            variables.setdefault(TRUST_VARIABLE, "1")
        if (copies := copies_folder()) is not None:  # for environments, which read their data in their own process
            variables.setdefault(COPIES_VARIABLE, str(copies))
        runtime_env: dict[str, Any] = {"env_vars": {name: str(value) for name, value in variables.items()}}
        if role.pip:
            runtime_env["pip"] = list(role.pip)
        if role.python:
            runtime_env["py_executable"] = role.python
        actor_options: dict[str, Any] = {
            "num_cpus": role.num_cpus,
            "num_gpus": options.num_gpus,
            "resources": dict(role.resources),
            "max_restarts": 0,
            "runtime_env": runtime_env,
        }
        if options.kind == "async":
            actor_options["max_concurrency"] = MAX_CONCURRENCY
        if options.node is not None:
            actor_options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=options.node, placement_group_capture_child_tasks=False
            )
        return actor_options

    def locate(self, node: int, devices: Sequence[int]) -> tuple[str, tuple[str, ...]]:
        return self.members[node].id, () if self.on_cpu else tuple(self._gpus[node][device] for device in devices)

    def put(self, value: Any) -> Any:
        return ray.put(value)

    def is_node_alive(self, index: int) -> bool:
        return self.members[index].id in {node["NodeID"] for node in ray.nodes() if node["Alive"]}

    def list_processes(self) -> Sequence[RemoteActor]:
        return [actor for actor in self._actors if actor.alive]

    async def close(self) -> None:
        await asyncio.gather(*(actor.kill() for actor in self._actors), return_exceptions=True)
        self._actors.clear()
        for reservation in self._reservations:
            ray.kill(reservation)
        with suppress(Exception):  # the cluster itself may have died
            remove_placement_group(self._group)
        await asyncio.to_thread(ray.shutdown)
        if self._guardian is not None:
            await asyncio.to_thread(self._guardian.close)


PROCESS_DIED = (
    exceptions.RayActorError,
    exceptions.NodeDiedError,
    exceptions.ObjectLostError,
    exceptions.OutOfMemoryError,  # killed by Ray because memory on the node ran low
)


class RayActor:
    """An object in a Ray actor."""

    pid: int | None

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.pid = None
        self.address = ""
        self._actor = actor
        self._ended = False

    @property
    def alive(self) -> bool:
        return not self._ended

    def submit(self, method: str, *arguments: Any, urgent: bool = False, **named: Any) -> Any:
        return (self._actor.urgent if urgent else self._actor.call).remote(method, *arguments, **named)

    def call(self, method: str, *arguments: Any, urgent: bool = False, **named: Any) -> Awaitable[Any]:
        return self._await_result(self.submit(method, *arguments, urgent=urgent, **named))

    def control_profile(self, what: str, operators: bool = False) -> Awaitable[Any]:
        return self._await_result(self._actor.control_profile.remote(what, operators))

    def call_actor(self, what: str, *arguments: Any) -> Awaitable[Any]:
        """Call a method of the actor itself, not of the object it holds: ``get_pid_and_address`` or ``make``."""
        return self._await_result(getattr(self._actor, what).remote(*arguments))

    def call_actor_sync(self, what: str, *arguments: Any, timeout: float | None = None) -> Any:
        with self._translate_errors():
            return ray.get(getattr(self._actor, what).remote(*arguments), timeout=timeout)

    def start_call(self, method: str, *arguments: Any, urgent: bool = False) -> Callable[[], Any]:
        reference = self.submit(method, *arguments, urgent=urgent)

        def wait() -> Any:
            with self._translate_errors():
                return ray.get(reference)

        return wait

    async def _await_result(self, reference: Any) -> Any:
        with self._translate_errors():
            return await reference

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate Ray's errors: raise the original exception of the other process, or ActorDied if the process has died."""
        try:
            yield
        except exceptions.RayTaskError as error:
            raise _unwrap_cause(error) from None
        except PROCESS_DIED as error:
            self._ended = True
            where = f"process {self.pid}, on {self.address or 'no node yet'}"
            raise ActorDied(f"{self.name} ({where}) died: {_extract_reason(error)}") from error

    async def kill(self) -> None:
        self._ended = True
        with suppress(Exception):
            ray.kill(self._actor, no_restart=True)
        if self.pid is None or self.address != get_own_address():
            return
        deadline = time.monotonic() + KILL_SECONDS
        while is_process_alive(self.pid):
            if time.monotonic() > deadline:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(self.pid, signal.SIGKILL)
                return
            await asyncio.sleep(POLL_SECONDS)


def _unwrap_cause(error: exceptions.RayTaskError) -> BaseException:
    """Return the exception raised in the other process, with its traceback as a note."""
    cause = error.cause
    if not isinstance(cause, BaseException):
        return error
    if not getattr(cause, "__notes__", None):
        cause.add_note(f"raised in another process:\n{str(error).strip()}")
    return cause


def _extract_reason(error: Exception) -> str:
    """Return the line of Ray's message that gives the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    informative = [line for line in lines if not line.startswith(_UNINFORMATIVE)]
    return (informative or lines or [type(error).__name__])[0][:300]


_UNINFORMATIVE = ("class_name", "actor_id", "pid", "name", "namespace", "ip", "The actor died", "The actor is dead")


def is_process_alive(process: int) -> bool:
    """Return whether a process on this machine runs; False for a zombie."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def get_own_address() -> str:
    return str(ray.util.get_node_ip_address())


# --- in the actors' processes ----------------------------------------------------------------------------------------------------------


class ThreadActor:
    """Holds one object and calls its methods one after another; urgent calls run concurrently with them."""

    def __init__(self, name: str, output: str | None) -> None:
        _set_up_process(name, output)
        self._object: Any = None

    def get_pid_and_address(self) -> tuple[int, str]:
        return os.getpid(), get_own_address()

    def make(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._object = make(*arguments)

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        with RECORDER.span("calls", method, _describe_target(arguments)):
            return getattr(self._object, method)(*arguments, **named)

    urgent = ray.method(concurrency_group="urgent")(call)

    def _control_profile(self, what: str, operators: bool = False) -> Any:
        return control_profile(what, operators)

    control_profile = ray.method(concurrency_group="profile")(_control_profile)


class AsyncActor:
    """Holds one object and calls its methods concurrently on an event loop."""

    def __init__(self, name: str, output: str | None) -> None:
        _set_up_process(name, output)
        self._object: Any = None

    async def get_pid_and_address(self) -> tuple[int, str]:
        return os.getpid(), get_own_address()

    async def make(self, make: Callable[..., Any], *arguments: Any) -> None:
        made = make(*arguments)
        self._object = await made if isinstance(made, Awaitable) else made

    async def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        with RECORDER.span("calls", method, _describe_target(arguments)):
            result = getattr(self._object, method)(*arguments, **named)
            return await result if isinstance(result, Awaitable) else result

    urgent = call

    async def control_profile(self, what: str, operators: bool = False) -> Any:
        return control_profile(what, operators)


def _describe_target(arguments: Sequence[Any]) -> str:
    """Return the learner, scorer or teacher that a call addresses, which is its first argument."""
    return arguments[0] if arguments and isinstance(arguments[0], str) and len(arguments[0]) < 40 else ""


class NodeReservation:
    """Holds the GPUs of a node for the run."""

    def gpu_ids(self) -> list[str]:
        return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


THREAD_ACTOR: Any = ray.remote(num_cpus=0, concurrency_groups={"urgent": 2, "profile": 1})(ThreadActor)
ASYNC_ACTOR: Any = ray.remote(num_cpus=0)(AsyncActor)
NODE_RESERVATION: Any = ray.remote(num_cpus=0)(NodeReservation)


def _set_up_process(name: str, output: str | None) -> None:
    if output is not None:
        _redirect_output(Path(output))
    with suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(f"strop {name}")


def _redirect_output(path: Path) -> None:
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


async def connect(
    config: ClusterConfig, *, on_cpu: bool | None, cpus_per_node: float = 1.0, output_folder: Path | None = None
) -> RayCluster:
    """Connect to the running cluster, or start one on this machine, and reserve nodes. Raises PlacementError, ConnectionError.

    Args:
        config: The nodes of the run.
        on_cpu: Whether processes replace GPUs; None: if no node has GPUs.
        cpus_per_node: CPUs to reserve on each node.
        output_folder: Folder on a shared disk for the output of processes, one file each.
    """
    guardian = await asyncio.to_thread(_connect_or_start, config.address, on_cpu, cpus_per_node)
    try:
        if on_cpu is None:
            on_cpu = not any(node.gpus for node in list_nodes())
        nodes = await _wait_for_nodes(config, on_cpu)
        bundle = {"CPU": cpus_per_node} | ({} if on_cpu else {"GPU": float(config.gpus_per_node)})
        group = await _reserve(bundle, nodes, config.wait_seconds)
        reservations = []
        for index in range(len(nodes)):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            gpus = 0 if on_cpu else config.gpus_per_node
            reservations.append(NODE_RESERVATION.options(num_gpus=gpus, scheduling_strategy=strategy).remote())
        return RayCluster(config, nodes, group, reservations, guardian, on_cpu=on_cpu, output_folder=output_folder)
    except BaseException:
        ray.shutdown()
        if guardian is not None:
            guardian.close()
        raise


def _connect_or_start(address: str | None, on_cpu: bool | None, cpus_per_node: float) -> Guardian | None:
    """Connect to the running cluster, or start one on this machine and return the guardian that ends it with this process.

    Raises ConnectionError, and RuntimeError if this process is already connected."""
    if ray.is_initialized():
        raise RuntimeError(
            "this process is already connected to a Ray cluster; disconnect with ray.shutdown() before starting a run"
        )
    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that it cannot handle signals, which the run handles itself
    quiet_options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    address = address or os.environ.get("RAY_ADDRESS") or _find_local_cluster()
    if address and address != "local":
        try:
            _check_reachable(address)
            with _authenticate("disabled"):
                ray.init(address=address, **quiet_options)
        except OSError as error:  # ConnectionError is one
            raise ConnectionError(
                f"no Ray cluster answers at {address} ({error}): start it (ray start --head; on other nodes ray start --address=...), or "
                "unset cluster.address and RAY_ADDRESS to start one on this machine"
            ) from error
        return None
    gpus = 0 if on_cpu else None
    cpus = max(os.cpu_count() or 1, int(cpus_per_node) + 1)
    guardian = Guardian()
    try:
        with guardian.mark_children(), _authenticate("token"):
            ray.init(
                address="local",
                num_cpus=cpus,
                num_gpus=gpus,
                include_dashboard=False,
                _system_config=LOCAL_CLUSTER_CONFIG,
                **quiet_options,
            )
    except Exception as error:  # Ray raises plain Exception here
        guardian.close()
        raise ConnectionError(f"a Ray cluster could not be started on this machine: {error}") from error
    return guardian


@contextmanager
def _authenticate(mode: Literal["token", "disabled"]) -> Iterator[None]:
    """Make Ray connect in this mode, and processes started inside the context use it, unless the user has set RAY_AUTH_MODE.

    Ray's servers listen on every interface, and without a token anyone who reaches one can run programs as this user. The token is in the
    environment of the cluster's processes, which other users cannot read; Ray itself would write it to the home folder.
    """
    if AUTH_CHOSEN:
        yield
        return
    before = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    os.environ["RAY_AUTH_MODE"] = mode
    if mode == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", TOKEN)
    ray._raylet.Config.initialize("")  # it was read on import
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _check_reachable(address: str) -> None:
    """Raise OSError if nothing listens at host:port. Ray itself would retry for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():  # otherwise a keyword of Ray, such as auto
        socket.create_connection((host, int(port)), timeout=10).close()


def _find_local_cluster() -> str | None:
    """Return the address of a cluster that `ray start` started on this machine, if it still answers.

    Raises ConnectionError if another user could have written it, because this run's code and data would go to that address.
    """
    path = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, encoding="ascii") as file:
            status, text = os.fstat(descriptor), file.read(300)
        host, _, port = text.strip().rpartition(":")
        with socket.create_connection((host, int(port)), timeout=2):
            pass
    except (OSError, ValueError):
        return None
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or not stat.S_ISREG(status.st_mode):
        owner = f"belongs to user {status.st_uid}" if status.st_uid != os.getuid() else "can be written by other users"
        raise ConnectionError(
            f"{path} names the Ray cluster at {host}:{port}, but {owner}, who would choose where this run's code and data go. Set "
            f"cluster.address={host}:{port} to join that cluster all the same, or cluster.address=local to start one for this run"
        )
    return f"{host}:{port}"


def list_nodes() -> list[Node]:
    """Return the nodes that are alive."""
    return [
        Node(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            cpus=float(node["Resources"].get("CPU", 0)),
            gpus=int(node["Resources"].get("GPU", 0)),
            domain=find_domain(node.get("Labels") or {}),
            labels=node.get("Labels") or {},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


async def _wait_for_nodes(config: ClusterConfig, on_cpu: bool) -> list[Node]:
    """Wait until enough nodes have joined, and choose those of the run. Raises PlacementError after ``wait_seconds``."""
    deadline = time.monotonic() + config.wait_seconds
    while True:
        try:
            return choose_nodes(list_nodes(), config.num_nodes, config.gpus_per_node, on_cpu=on_cpu, segment=config.segment_size)
        except PlacementError:
            if config.num_nodes == 1 or time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.5)


async def _reserve(bundle: Mapping[str, float], nodes: Sequence[Node], seconds: float) -> Any:
    """Reserve a bundle on each node. Return the placement group. Raises PlacementError if the resources do not become free in time."""
    group = placement_group(
        [dict(bundle) for _ in nodes],
        strategy="PACK",
        bundle_label_selector=[{"ray.io/node-id": node.id} for node in nodes],
    )
    try:
        await asyncio.wait_for(group.ready(), seconds)
    except TimeoutError:
        remove_placement_group(group)
        raise PlacementError(
            f"{bundle} on each of {', '.join(node.address for node in nodes)} could not be reserved within {seconds:g} s "
            f"(cluster.wait_seconds): another run holds them; free: {ray.available_resources()}"
        ) from None
    return group


async def run_on_every_node(make: Callable[..., Any], *arguments: Any) -> list[tuple[Node, Any]]:
    """Run ``make(*arguments)`` once on each node of the connected cluster. Return (node, result or exception) for each."""

    task: Any = ray.remote(num_cpus=0, max_retries=0)(_call)

    async def run_on_node(node: Node) -> tuple[Node, Any]:
        strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
        try:
            return node, await task.options(scheduling_strategy=strategy).remote(make, *arguments)
        except exceptions.RayTaskError as error:
            return node, _unwrap_cause(error)
        except exceptions.RayError as error:
            return node, error

    return list(await asyncio.gather(*(run_on_node(node) for node in list_nodes())))


def _call(make: Callable[..., Any], *arguments: Any) -> Any:
    return make(*arguments)
