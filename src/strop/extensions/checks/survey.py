"""Inspect the nodes of a cluster from the driver, for the preflight checks."""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from strop.distributed.actor_group import ActorGroup, ActorGroupDied
from strop.distributed.base import ActorDied, ActorOptions
from strop.distributed.cluster_config import ClusterConfig
from strop.distributed.placement import Node, PlacementError
from strop.distributed.ray import RayCluster, connect, list_nodes, run_on_every_node
from strop.extensions.checks.preflight import (
    TOKEN_FILE,
    AllReduceProbe,
    AllReduceSpeed,
    ClusterSurvey,
    NodeInfo,
    NodeReport,
    RunNeeds,
    format_os_error,
    get_versions,
    probe_node,
)

FOLDER_TIMEOUT = 10.0  # until a file written by another node must be visible
ALL_REDUCE_TIMEOUT = 120.0
CPU_BYTES, GPU_BYTES = 16 << 20, 256 << 20  # size of the all-reduce


@dataclass(frozen=True, kw_only=True)
class ConnectedCluster:
    """A cluster to inspect, with the resources requested by the run unless there is a ``placement_error``."""

    cluster: RayCluster
    nodes: Sequence[Node]
    on_cpu: bool
    placement_error: str = ""


@asynccontextmanager
async def connect_to_inspect(
    config: ClusterConfig, *, on_cpu: bool | None, cpus_per_node: float
) -> AsyncIterator[ConnectedCluster]:
    """Connect as a run would. If the cluster cannot satisfy the run, connect without its requirements.

    Raises ConnectionError, PlacementError, RuntimeError."""
    placement_error = ""
    try:
        cluster = await connect(config, on_cpu=on_cpu, cpus_per_node=cpus_per_node)
    except PlacementError as error:
        placement_error = str(error)
        without_requirements = replace(config, num_nodes=1, gpus_per_node=0, segment_size=None)
        cluster = await connect(without_requirements, on_cpu=True, cpus_per_node=0.001)
    try:
        nodes = list_nodes()
        yield ConnectedCluster(
            cluster=cluster,
            nodes=nodes if placement_error else cluster.members,
            on_cpu=not any(node.gpus for node in nodes) if on_cpu is None else on_cpu,
            placement_error=placement_error,
        )
    finally:
        await cluster.close()


async def survey_cluster(connected: ConnectedCluster, needs: RunNeeds) -> ClusterSurvey:
    """Inspect every node, and time an all-reduce over all of them."""
    with _write_tokens(needs.folder_keys) as token:
        writable = tuple(folder for folder in needs.folder_keys if folder not in token.unwritable)
        reports = await _probe_nodes(connected.nodes, needs, writable, token.name)
        visible = {folder: await _wait_for_node_files(folder, token.name, reports) for folder in writable}
    speed, failure = await _try_all_reduce(connected, needs)
    return ClusterSurvey(
        driver=get_versions(needs.packages),
        nodes=reports,
        needs=needs,
        on_cpu=connected.on_cpu,
        placement_error=connected.placement_error,
        unwritable=token.unwritable,
        visible_files=visible,
        all_reduce=speed,
        all_reduce_failure=failure,
    )


async def _probe_nodes(nodes: Sequence[Node], needs: RunNeeds, folders: tuple[str, ...], token: str) -> list[NodeReport]:
    answers = await run_on_every_node(probe_node, needs.packages, folders, token)
    results = {node.id: result for node, result in answers}
    gone = RuntimeError("the node has left the cluster")
    return [_make_report(number, node, results.get(node.id, gone)) for number, node in enumerate(nodes)]


def _make_report(number: int, node: Node, result: NodeInfo | BaseException) -> NodeReport:
    report = NodeReport(number=number, address=node.address, gpus=node.gpus)
    if isinstance(result, BaseException):
        return replace(report, failure=f"{type(result).__name__}: {_first_line(result)}")
    return replace(report, info=result)


def _first_line(error: object) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]


# --- folders ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FolderToken:
    """A file that the driver writes to each folder, for the other nodes to find."""

    name: str  # of the subfolder that holds the file, and the content of the file
    unwritable: dict[str, str]  # folder -> why the driver cannot write there


@contextmanager
def _write_tokens(folders: Mapping[str, str]) -> Iterator[FolderToken]:
    """Write a token to each folder; on exit, remove it and the folders made for it."""
    token = FolderToken(f".strop-check-{uuid.uuid4().hex}", {})
    created: list[Path] = []
    try:
        for folder in folders:
            subfolder = Path(folder) / token.name
            try:
                created += [path for path in (subfolder, *subfolder.parents) if not path.exists()]
                subfolder.mkdir(parents=True)
                (subfolder / TOKEN_FILE).write_text(token.name)
            except OSError as error:
                token.unwritable[folder] = format_os_error(error)
        yield token
    finally:
        for folder in folders:
            shutil.rmtree(Path(folder) / token.name, ignore_errors=True)
        for path in sorted(created, key=lambda path: -len(path.parts)):
            with suppress(OSError):  # not empty: another process wrote to it; or it was never created
                path.rmdir()


async def _wait_for_node_files(folder: str, token: str, reports: Sequence[NodeReport]) -> frozenset[int]:
    """Return the nodes whose files the driver sees. Wait up to ``FOLDER_TIMEOUT``: network file systems show new files late."""
    written = {report.number: report.info.folders[folder].file for report in reports if report.info}
    files = {number: Path(folder) / token / file for number, file in written.items() if file}
    deadline = time.monotonic() + FOLDER_TIMEOUT
    while True:
        visible = frozenset(number for number, file in files.items() if file.exists())
        if len(visible) == len(files) or time.monotonic() > deadline:
            return visible
        await asyncio.sleep(0.2)


# --- all-reduce ------------------------------------------------------------------------------------------------------------------------


async def _try_all_reduce(connected: ConnectedCluster, needs: RunNeeds) -> tuple[AllReduceSpeed | None, str]:
    """Time it with one rank on each node, or on each device of a single node. Return (speed, why it could not be measured)."""
    ranks = [(node, 0) for node in range(len(connected.nodes))]
    if len(ranks) == 1:
        ranks = [(0, device) for device in range(needs.devices)]
    if connected.placement_error or len(ranks) < 2:
        return None, ""
    group = f"a process group of {len(ranks)} ranks"
    try:
        return await asyncio.wait_for(_time_all_reduce(connected, ranks, needs.environment), ALL_REDUCE_TIMEOUT), ""
    except TimeoutError:
        return None, f"{group} did not finish within {ALL_REDUCE_TIMEOUT:g} s: the nodes cannot reach each other"
    except (ActorGroupDied, ActorDied, RuntimeError) as error:
        return None, f"{group} failed: {_first_line(error)}"


async def _time_all_reduce(
    connected: ConnectedCluster, ranks: Sequence[tuple[int, int]], environment: Mapping[str, str]
) -> AllReduceSpeed:
    size = CPU_BYTES if connected.on_cpu else GPU_BYTES
    variables = {"OMP_NUM_THREADS": "1", **environment}
    options = [
        ActorOptions(name=f"check-{rank}", node=node, devices=(device,), environment=variables)
        for rank, (node, device) in enumerate(ranks)
    ]
    spawn = connected.cluster.spawn
    actors = await asyncio.gather(
        *(spawn(each, AllReduceProbe, rank, len(ranks), connected.on_cpu) for rank, each in enumerate(options))
    )
    group = ActorGroup("check", actors)
    port = await group.call_one(0, "open_store", actors[0].address)
    speeds = await group.call_all("measure_bandwidth", actors[0].address, port, size, ALL_REDUCE_TIMEOUT)
    await group.close()
    backend = "gloo" if connected.on_cpu else "nccl"
    return AllReduceSpeed(backend=backend, nodes=tuple(node for node, _ in ranks), size=size, bandwidth=min(speeds))
