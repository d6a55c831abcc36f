"""``strop cluster check``: check the nodes that a configuration asks for before a long run."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from strop.build.cluster.cluster_run import compute_reserved_cpus
from strop.build.cluster.device_plan import format_device_rows, format_placement, make_device_plan
from strop.config import TrainingRunConfig
from strop.config.checks.device_counts import count_devices
from strop.config.load.load import PLACEHOLDER_MODEL
from strop.config.schema.run_config import DistillationRunConfig, list_trained_models
from strop.distributed.actor_group import ActorGroup, ActorGroupDied
from strop.distributed.base import ActorDied, ActorOptions
from strop.distributed.node_probe import PACKAGES, TOKEN_FILE, LinkProbe, format_os_error, get_time, get_versions, probe_node
from strop.distributed.placement import Node, PlacementError
from strop.distributed.preflight import (
    ClusterSurvey,
    Finding,
    FolderStatus,
    LinkSpeeds,
    NodeInfo,
    NodeReport,
    ProbeRequest,
    align_columns,
    find_problems,
    format_findings,
    format_links,
    format_nodes,
)

if TYPE_CHECKING:
    from strop.distributed.ray import ClusterOptions, RayCluster

NODE_WAIT_SECONDS = 30.0  # for nodes to join and resources to be free; a run waits for cluster.wait_seconds
FOLDER_TIMEOUT = 10.0  # until a file written by another node must be visible
LINK_TIMEOUT = 120.0
CPU_BYTES, GPU_BYTES = 16 << 20, 256 << 20  # size of the large all-reduce


@dataclass(frozen=True)
class FolderToken:
    """A file that the driver writes to each folder, for the other nodes to find."""

    name: str  # of the subfolder that holds the file, and the content of the file
    unwritable: dict[str, str]  # folder -> why the driver cannot write there


@dataclass(frozen=True, kw_only=True)
class ConnectedCluster:
    """The nodes to check, and the cluster with the resources that the run asks for."""

    nodes: Sequence[Node]
    cluster: RayCluster | None  # None: the nodes do not have what the run asks for
    placement_error: str = ""  # why they do not
    started_here: bool = False  # whether this check started the cluster, on this machine
    on_cpu: bool = True


def check_cluster(config: TrainingRunConfig) -> int:
    """Print a report about the cluster. Return 0 if a run can start on it, 1 if there are problems."""
    return asyncio.run(_check(config))


async def _check(config: TrainingRunConfig) -> int:
    try:
        async with _connect(config) as connected:
            survey = await _inspect_cluster(config, connected)
            _print_survey(config, connected, survey)
            findings = find_problems(survey)
    except (ConnectionError, PlacementError, ImportError, RuntimeError) as error:
        print(f"problem  {error}", file=sys.stderr)
        return 1
    if connected.placement_error:
        findings.insert(0, Finding("cluster", connected.placement_error, "The nodes above are the ones in the cluster."))
    findings += list(_check_layout(config, connected))
    return _print_findings(findings)


# --- connecting ------------------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _connect(config: TrainingRunConfig) -> AsyncIterator[ConnectedCluster]:
    """Connect as a run would. If the cluster cannot satisfy the run, connect without its requirements to inspect the nodes.

    Raises ConnectionError, PlacementError, ImportError, RuntimeError."""
    from strop.distributed.ray import ClusterOptions, connect, list_nodes

    devices = count_devices(config)
    options = ClusterOptions(
        num_nodes=devices.nodes,
        devices_per_node=devices.per_node,
        on_cpu={"cpu": True, "auto": None}.get(config.policy.device, False),
        segment_size=config.cluster.segment_size,
        address=config.cluster.address,
        wait_seconds=min(config.cluster.wait_seconds, NODE_WAIT_SECONDS),
        cpus_per_node=compute_reserved_cpus(config),
    )
    try:
        cluster, placement_error = await connect(options), ""
    except PlacementError as error:
        cluster, placement_error = await connect(_without_requirements(options)), str(error)
    try:
        nodes = list_nodes() if placement_error else cluster.members
        on_cpu = options.on_cpu if options.on_cpu is not None else not any(node.gpus for node in list_nodes())
        yield ConnectedCluster(
            nodes=nodes,
            cluster=None if placement_error else cluster,
            placement_error=placement_error,
            started_here=cluster.started_here,
            on_cpu=bool(on_cpu),
        )
    finally:
        await cluster.close()


def _without_requirements(options: ClusterOptions) -> ClusterOptions:
    """Return options that any cluster satisfies."""
    return replace(options, num_nodes=1, devices_per_node=0, on_cpu=True, segment_size=None, cpus_per_node=0.001)


# --- inspecting nodes ------------------------------------------------------------------------------------------------------------------


async def _inspect_cluster(config: TrainingRunConfig, connected: ConnectedCluster) -> ClusterSurvey:
    keys = _shared_folders(config)
    with _write_tokens(keys) as token:
        writable = tuple(folder for folder in keys if folder not in token.unwritable)
        request = ProbeRequest(
            packages=_required_packages(config), models=_model_names(config), folders=writable, token=token.name
        )
        results = await _probe_nodes(request)
        skews = await _measure_clock_skew(connected.nodes)
        reports = [_make_node_report(number, node, results, skews) for number, node in enumerate(connected.nodes)]
        visible = {folder: await _wait_for_node_files(folder, token, reports) for folder in writable}
    links, failure = await _try_measure_links(config, connected)
    return ClusterSurvey(
        driver=get_versions(request.packages),
        nodes=reports,
        devices=config.cluster.gpus_per_node,
        on_cpu=connected.on_cpu,
        visible_files=visible,
        unwritable=token.unwritable,
        folder_keys=keys,
        links=links,
        links_failure=failure,
    )


def _required_packages(config: TrainingRunConfig) -> tuple[str, ...]:
    """Return the packages to compare; vLLM is among them if engines use the packages of the node."""
    role = config.cluster.roles.generator
    needs_vllm = config.policy.generation.backend == "vllm" and role.python is None and not role.pip
    return (*PACKAGES, "vllm") if needs_vllm else PACKAGES


def _model_names(config: TrainingRunConfig) -> tuple[str, ...]:
    names = [model.model_name for _, model in list_trained_models(config)]
    if isinstance(config, DistillationRunConfig):
        names += [teacher.model_name for teacher in (config.teacher, *config.teachers.values())]
    return tuple(dict.fromkeys(name for name in names if name not in (PLACEHOLDER_MODEL, "self")))


def _shared_folders(config: TrainingRunConfig) -> dict[str, str]:
    """Return the folders that all nodes must share, each with the key that sets it."""
    folders = {str(Path(config.logger.log_dir).resolve()): "logger.log_dir"}
    if config.checkpointing.enabled:
        folders[str(Path(config.checkpointing.checkpoint_dir).resolve())] = "checkpointing.checkpoint_dir"
    return folders


async def _probe_nodes(request: ProbeRequest) -> dict[str, NodeInfo | BaseException]:
    from strop.distributed.ray import run_on_every_node

    return {node.id: result for node, result in await run_on_every_node(probe_node, request)}


async def _measure_clock_skew(nodes: Sequence[Node]) -> dict[str, tuple[float, float]]:
    """Return by node id (seconds its clock is ahead of the driver's, error of this estimate): the most exact of three tries."""
    from strop.distributed.ray import run_on_every_node

    skews: dict[str, tuple[float, float]] = {}
    for _ in range(3):
        sent = time.time()
        results = await run_on_every_node(get_time)
        received = time.time()
        for node, node_time in results:
            error = (received - sent) / 2
            if isinstance(node_time, float) and error < skews.get(node.id, (0.0, float("inf")))[1]:
                skews[node.id] = node_time - (sent + received) / 2, error
    return skews


def _make_node_report(
    number: int, node: Node, results: Mapping[str, NodeInfo | BaseException], skews: Mapping[str, tuple[float, float]]
) -> NodeReport:
    result = results.get(node.id, RuntimeError("the node has left the cluster"))
    skew, error = skews.get(node.id, (None, 0.0))
    return NodeReport(
        number=number,
        address=node.address,
        cpus=node.cpus,
        gpus=node.gpus,
        info=None if isinstance(result, BaseException) else result,
        failure=f"{type(result).__name__}: {_first_line(result)}" if isinstance(result, BaseException) else "",
        skew=skew,
        skew_error=error,
    )


def _first_line(error: object) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]


# --- folders ---------------------------------------------------------------------------------------------------------------------------


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


async def _wait_for_node_files(folder: str, token: FolderToken, reports: Sequence[NodeReport]) -> frozenset[int]:
    """Return the nodes whose files the driver sees. Wait up to ``FOLDER_TIMEOUT``: network file systems show new files late."""
    files = {
        node.number: Path(folder) / token.name / status.file
        for node in reports
        if (status := _folder_status(node, folder)) and status.file
    }
    deadline = time.monotonic() + FOLDER_TIMEOUT
    while True:
        visible = frozenset(number for number, file in files.items() if file.exists())
        if len(visible) == len(files) or time.monotonic() > deadline:
            return visible
        await asyncio.sleep(0.2)


def _folder_status(node: NodeReport, folder: str) -> FolderStatus | None:
    return None if node.info is None else node.info.folders.get(folder)


# --- links -----------------------------------------------------------------------------------------------------------------------------


async def _try_measure_links(config: TrainingRunConfig, connected: ConnectedCluster) -> tuple[LinkSpeeds | None, str]:
    """Measure links with one rank on each node, or on each device of a single node. Return (links, why they could not be measured)."""
    if connected.cluster is None:
        return None, ""
    ranks = [(node, 0) for node in range(len(connected.nodes))]
    if len(ranks) == 1:
        ranks = [(0, device) for device in range(config.cluster.gpus_per_node)]
    if len(ranks) < 2:
        return None, ""
    try:
        return await asyncio.wait_for(_measure_links(config, connected, connected.cluster, ranks), LINK_TIMEOUT), ""
    except TimeoutError:
        return (
            None,
            f"a process group of {len(ranks)} ranks did not finish within {LINK_TIMEOUT:g} s: the nodes cannot reach each other",
        )
    except (ActorGroupDied, ActorDied, RuntimeError) as error:
        return None, f"a process group of {len(ranks)} ranks failed: {_first_line(error)}"


async def _measure_links(
    config: TrainingRunConfig, connected: ConnectedCluster, cluster: RayCluster, ranks: Sequence[tuple[int, int]]
) -> LinkSpeeds:
    world, size = len(ranks), CPU_BYTES if connected.on_cpu else GPU_BYTES
    environment = {"OMP_NUM_THREADS": "1", **config.cluster.roles.learner.env_vars}
    actors = await asyncio.gather(
        *(
            cluster.spawn(
                ActorOptions(name=f"check-{rank}", node=node, devices=(device,), environment=environment),
                *(LinkProbe, rank, world, connected.on_cpu),
            )
            for rank, (node, device) in enumerate(ranks)
        )
    )
    group = ActorGroup("check", actors)
    port = await group.call_one(0, "open_store", actors[0].address)
    await group.call_all("init_process_group", actors[0].address, port, LINK_TIMEOUT)
    latency = max(await group.call_all("measure_latency", 50))
    bandwidth = min(await group.call_all("measure_bandwidth", size, 3))
    ring = (
        [max(await group.call_all("measure_link", rank, (rank + 1) % world, size)) for rank in range(world)] if world > 2 else []
    )
    await group.close()
    return LinkSpeeds(
        backend="gloo" if connected.on_cpu else "nccl",
        nodes=tuple(node for node, _ in ranks),
        latency=latency,
        size=size,
        bandwidth=bandwidth,
        ring=tuple(ring),
    )


# --- printing --------------------------------------------------------------------------------------------------------------------------


def _print_survey(config: TrainingRunConfig, connected: ConnectedCluster, survey: ClusterSurvey) -> None:
    if connected.started_here:
        print("No Ray cluster is running: one was started on this machine for the check, as a run would do.\n")
    print("\n".join(format_nodes(survey)), "\n", sep="")
    rows = [("versions", ", ".join(f"{name} {version or 'not installed'}" for name, version in survey.driver.items()))]
    rows += [(key, f"{folder}{_format_folder(survey, folder)}") for folder, key in survey.folder_keys.items()]
    rows += [
        ("model", f"{name}: readable on {_count_readers(survey, name)} of {len(survey.nodes)} nodes")
        for name in _model_names(config)
    ]
    if survey.links is not None:
        rows += [("interconnect", row) for row in format_links(survey.links)]
    elif not survey.links_failure:
        rows.append(("interconnect", "not measured: there is only one device" if connected.cluster else "not measured"))
    print("\n".join(align_columns(rows)))


def _format_folder(survey: ClusterSurvey, folder: str) -> str:
    free = [status.free for node in survey.nodes if (status := _folder_status(node, folder)) and status.shared]
    return f": shared by {len(free)} of {len(survey.nodes)} nodes" + (f", {min(free):.0f} GiB free" if free else "")


def _count_readers(survey: ClusterSurvey, name: str) -> int:
    return sum(node.info is not None and node.info.models.get(name) == "" for node in survey.nodes)


def _check_layout(config: TrainingRunConfig, connected: ConnectedCluster) -> Iterator[Finding]:
    """Print which devices train and which generate; yield a finding if the layout does not fit."""
    if not count_devices(config).uses_ray:
        print("\nThis configuration trains on one device, in one process, without Ray (cluster.backend).")
        return
    try:
        lines = format_placement(config, on_cpu=connected.on_cpu)
        rows = format_device_rows(make_device_plan(config, on_cpu=connected.on_cpu), config.cluster.num_nodes)
    except ValueError as error:
        yield Finding("layout", str(error), "The run's own command with `--dry-run` reports the same without a cluster.")
        return
    print("", *lines, "", *align_columns([("node", "devices that train", "devices that generate"), *rows]), sep="\n")


def _print_findings(findings: Sequence[Finding]) -> int:
    fatal = sum(finding.fatal for finding in findings)
    ordered = sorted(findings, key=lambda finding: not finding.fatal)
    print("", *format_findings(ordered), sep="\n")
    if fatal:
        print(f"\n{fatal} problem{'s' if fatal > 1 else ''}: a run would fail or misbehave.")
        return 1
    print("no problems found" if not findings else "\nno problems that would stop a run")
    return 0
