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

from strop.assembly.clusters import reserved_cpus
from strop.assembly.divisions import device_rows, division_of, placement_lines
from strop.cluster.base import HostDied, HostOptions
from strop.cluster.check import (
    Finding,
    FolderSeen,
    Links,
    NodeFacts,
    NodeReport,
    Question,
    Survey,
    aligned,
    finding_rows,
    judge,
    link_rows,
    node_rows,
)
from strop.cluster.group import GroupDied, WorkerGroup
from strop.cluster.placement import Node, PlacementError
from strop.cluster.probe import PACKAGES, TOKEN_FILE, LinkProbe, look, now, reason, versions
from strop.config import TrainingRunConfig
from strop.config.devices import devices_of
from strop.config.kinds import NO_MODEL
from strop.config.schema import DistillationRunConfig, trained_models

if TYPE_CHECKING:
    from strop.cluster.ray import ClusterOptions, RayCluster

WAIT_SECONDS = 30.0  # for nodes to join and resources to be free; a run waits for cluster.wait_seconds
FOLDER_SECONDS = 10.0  # until a file written by another node must be visible
LINK_SECONDS = 120.0
CPU_BYTES, GPU_BYTES = 16 << 20, 256 << 20  # size of the large all-reduce


@dataclass(frozen=True)
class Token:
    """A file that the driver writes to each folder, for the other nodes to find."""

    name: str  # of the subfolder that holds the file, and the content of the file
    unwritable: dict[str, str]  # folder -> why the driver cannot write there


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The nodes to check, and the cluster with the resources that the run asks for."""

    nodes: Sequence[Node]
    cluster: RayCluster | None  # None: the nodes do not have what the run asks for
    refusal: str = ""  # why they do not
    started: bool = False  # whether this check started the cluster, on this machine
    on_cpu: bool = True


def check_cluster(config: TrainingRunConfig) -> int:
    """Print a report about the cluster. Return 0 if a run can start on it, 1 if there are problems."""
    return asyncio.run(_check(config))


async def _check(config: TrainingRunConfig) -> int:
    try:
        async with _joined(config) as joined:
            survey = await _survey(config, joined)
            _print_survey(config, joined, survey)
            found = judge(survey)
    except (ConnectionError, PlacementError, ImportError, RuntimeError) as error:
        print(f"problem  {error}", file=sys.stderr)
        return 1
    if joined.refusal:
        found.insert(0, Finding("cluster", joined.refusal, "The nodes above are the ones in the cluster."))
    found += list(_layout(config, joined))
    return _print_findings(found)


# --- connecting ------------------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _joined(config: TrainingRunConfig) -> AsyncIterator[Joined]:
    """Connect as a run would. If the cluster cannot satisfy the run, connect without its requirements to inspect what is there.

    Raises ConnectionError, PlacementError, ImportError, RuntimeError."""
    from strop.cluster.ray import ClusterOptions, connect, nodes_of_cluster

    devices = devices_of(config)
    wanted = ClusterOptions(
        nodes=devices.nodes,
        devices_per_node=devices.per_node,
        on_cpu={"cpu": True, "auto": None}.get(config.policy.device, False),
        segment=config.cluster.segment_size,
        address=config.cluster.address,
        wait_seconds=min(config.cluster.wait_seconds, WAIT_SECONDS),
        cpus_per_node=reserved_cpus(config),
    )
    try:
        cluster, refusal = await connect(wanted), ""
    except PlacementError as error:
        cluster, refusal = await connect(_any_node(wanted)), str(error)
    try:
        nodes = nodes_of_cluster() if refusal else cluster.members
        on_cpu = wanted.on_cpu if wanted.on_cpu is not None else not any(node.gpus for node in nodes_of_cluster())
        yield Joined(
            nodes=nodes, cluster=None if refusal else cluster, refusal=refusal, started=cluster.owned, on_cpu=bool(on_cpu)
        )
    finally:
        await cluster.close()


def _any_node(options: ClusterOptions) -> ClusterOptions:
    """Return options that any cluster satisfies."""
    return replace(options, nodes=1, devices_per_node=0, on_cpu=True, segment=None, cpus_per_node=0.001)


# --- inspecting nodes ------------------------------------------------------------------------------------------------------------------


async def _survey(config: TrainingRunConfig, joined: Joined) -> Survey:
    keys = _folders(config)
    with _written(keys) as token:
        asked = tuple(folder for folder in keys if folder not in token.unwritable)
        question = Question(packages=_packages(config), models=_models(config), folders=asked, token=token.name)
        answers = await _asked(question)
        skews = await _skews(joined.nodes)
        reports = [_report(number, node, answers, skews) for number, node in enumerate(joined.nodes)]
        written = {folder: await _seen(folder, token, reports) for folder in asked}
    links, failure = await _links(config, joined)
    return Survey(
        driver=versions(question.packages),
        nodes=reports,
        devices=config.cluster.gpus_per_node,
        on_cpu=joined.on_cpu,
        written=written,
        unwritable=token.unwritable,
        folder_keys=keys,
        links=links,
        links_failure=failure,
    )


def _packages(config: TrainingRunConfig) -> tuple[str, ...]:
    """Return the packages to compare; vLLM is among them if engines use the packages of the node."""
    role = config.cluster.roles.generator
    needs_vllm = config.policy.generation.backend == "vllm" and role.python is None and not role.pip
    return (*PACKAGES, "vllm") if needs_vllm else PACKAGES


def _models(config: TrainingRunConfig) -> tuple[str, ...]:
    names = [model.model_name for _, model in trained_models(config)]
    if isinstance(config, DistillationRunConfig):
        names += [teacher.model_name for teacher in (config.teacher, *config.teachers.values())]
    return tuple(dict.fromkeys(name for name in names if name not in (NO_MODEL, "self")))


def _folders(config: TrainingRunConfig) -> dict[str, str]:
    """Return the folders that all nodes must share, each with the key that sets it."""
    named = {str(Path(config.logger.log_dir).resolve()): "logger.log_dir"}
    if config.checkpointing.enabled:
        named[str(Path(config.checkpointing.checkpoint_dir).resolve())] = "checkpointing.checkpoint_dir"
    return named


async def _asked(question: Question) -> dict[str, NodeFacts | BaseException]:
    from strop.cluster.ray import on_every_node

    return {node.id: answer for node, answer in await on_every_node(look, question)}


async def _skews(nodes: Sequence[Node]) -> dict[str, tuple[float, float]]:
    """Return by node id (seconds its clock is ahead of the driver's, error of this estimate): the most exact of three tries."""
    from strop.cluster.ray import on_every_node

    found: dict[str, tuple[float, float]] = {}
    for _ in range(3):
        before = time.time()
        answers = await on_every_node(now)
        after = time.time()
        for node, there in answers:
            error = (after - before) / 2
            if isinstance(there, float) and error < found.get(node.id, (0.0, float("inf")))[1]:
                found[node.id] = there - (before + after) / 2, error
    return found


def _report(
    number: int, node: Node, answers: Mapping[str, NodeFacts | BaseException], skews: Mapping[str, tuple[float, float]]
) -> NodeReport:
    answer = answers.get(node.id, RuntimeError("the node has left the cluster"))
    skew, error = skews.get(node.id, (None, 0.0))
    return NodeReport(
        number=number,
        address=node.address,
        cpus=node.cpus,
        gpus=node.gpus,
        facts=None if isinstance(answer, BaseException) else answer,
        failure=f"{type(answer).__name__}: {_first_line(answer)}" if isinstance(answer, BaseException) else "",
        skew=skew,
        skew_error=error,
    )


def _first_line(error: object) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]


# --- folders ---------------------------------------------------------------------------------------------------------------------------


@contextmanager
def _written(folders: Mapping[str, str]) -> Iterator[Token]:
    """Write a token to each folder; on exit, remove it and the folders made for it."""
    token = Token(f".strop-check-{uuid.uuid4().hex}", {})
    made: list[Path] = []
    try:
        for folder in folders:
            inside = Path(folder) / token.name
            try:
                made += [path for path in (inside, *inside.parents) if not path.exists()]
                inside.mkdir(parents=True)
                (inside / TOKEN_FILE).write_text(token.name)
            except OSError as error:
                token.unwritable[folder] = reason(error)
        yield token
    finally:
        for folder in folders:
            shutil.rmtree(Path(folder) / token.name, ignore_errors=True)
        for path in sorted(made, key=lambda path: -len(path.parts)):
            with suppress(OSError):  # another process has written to it meanwhile, or it was never created
                path.rmdir()


async def _seen(folder: str, token: Token, reports: Sequence[NodeReport]) -> frozenset[int]:
    """Return the nodes whose files the driver sees. Wait up to ``FOLDER_TIMEOUT``: network file systems show new files late."""
    files = {
        node.number: Path(folder) / token.name / seen.file for node in reports if (seen := _view(node, folder)) and seen.file
    }
    deadline = time.monotonic() + FOLDER_SECONDS
    while True:
        here = frozenset(number for number, file in files.items() if file.exists())
        if len(here) == len(files) or time.monotonic() > deadline:
            return here
        await asyncio.sleep(0.2)


def _view(node: NodeReport, folder: str) -> FolderSeen | None:
    return None if node.facts is None else node.facts.folders.get(folder)


# --- links -----------------------------------------------------------------------------------------------------------------------------


async def _links(config: TrainingRunConfig, joined: Joined) -> tuple[Links | None, str]:
    """Measure links with one rank on each node, or on each device of a single node. Return (links, why they could not be measured)."""
    if joined.cluster is None:
        return None, ""
    places = [(node, 0) for node in range(len(joined.nodes))]
    if len(places) == 1:
        places = [(0, device) for device in range(config.cluster.gpus_per_node)]
    if len(places) < 2:
        return None, ""
    try:
        return await asyncio.wait_for(_measured(config, joined, joined.cluster, places), LINK_SECONDS), ""
    except TimeoutError:
        return (
            None,
            f"a process group of {len(places)} ranks did not finish within {LINK_SECONDS:g} s: the nodes cannot reach each other",
        )
    except (GroupDied, HostDied, RuntimeError) as error:
        return None, f"a process group of {len(places)} ranks failed: {_first_line(error)}"


async def _measured(config: TrainingRunConfig, joined: Joined, cluster: RayCluster, places: Sequence[tuple[int, int]]) -> Links:
    world, size = len(places), CPU_BYTES if joined.on_cpu else GPU_BYTES
    environment = {"OMP_NUM_THREADS": "1", **config.cluster.roles.learner.env_vars}
    hosts = await asyncio.gather(
        *(
            cluster.host(
                HostOptions(name=f"check-{rank}", node=node, devices=(device,), environment=environment),
                *(LinkProbe, rank, world, joined.on_cpu),
            )
            for rank, (node, device) in enumerate(places)
        )
    )
    group = WorkerGroup("check", hosts)
    port = await group.one(0, "open_store", hosts[0].address)
    await group.all("join", hosts[0].address, port, LINK_SECONDS)
    latency = max(await group.all("latency", 50))
    bandwidth = min(await group.all("bandwidth", size, 3))
    ring = [max(await group.all("link", rank, (rank + 1) % world, size)) for rank in range(world)] if world > 2 else []
    await group.close()
    return Links(
        backend="gloo" if joined.on_cpu else "nccl",
        nodes=tuple(node for node, _ in places),
        latency=latency,
        size=size,
        bandwidth=bandwidth,
        ring=tuple(ring),
    )


# --- printing --------------------------------------------------------------------------------------------------------------------------


def _print_survey(config: TrainingRunConfig, joined: Joined, survey: Survey) -> None:
    if joined.started:
        print("No Ray cluster is running: one was started on this machine for the check, as a run would do.\n")
    print("\n".join(node_rows(survey)), "\n", sep="")
    rows = [("versions", ", ".join(f"{name} {version or 'not installed'}" for name, version in survey.driver.items()))]
    rows += [(key, f"{folder}{_folder(survey, folder)}") for folder, key in survey.folder_keys.items()]
    rows += [("model", f"{name}: readable on {_readers(survey, name)} of {len(survey.nodes)} nodes") for name in _models(config)]
    if survey.links is not None:
        rows += [("interconnect", row) for row in link_rows(survey.links)]
    elif not survey.links_failure:
        rows.append(("interconnect", "not measured: there is only one device" if joined.cluster else "not measured"))
    print("\n".join(aligned(rows)))


def _folder(survey: Survey, folder: str) -> str:
    free = [seen.free for node in survey.nodes if (seen := _view(node, folder)) and seen.shared]
    return f": shared by {len(free)} of {len(survey.nodes)} nodes" + (f", {min(free):.0f} GiB free" if free else "")


def _readers(survey: Survey, name: str) -> int:
    return sum(node.facts is not None and node.facts.models.get(name) == "" for node in survey.nodes)


def _layout(config: TrainingRunConfig, joined: Joined) -> Iterator[Finding]:
    """Print which devices train and which generate; yield a finding if the layout does not fit."""
    if not devices_of(config).ray:
        print("\nThis configuration trains on one device, in one process, without Ray (cluster.backend).")
        return
    try:
        lines = placement_lines(config, on_cpu=joined.on_cpu)
        rows = device_rows(division_of(config, on_cpu=joined.on_cpu), config.cluster.num_nodes)
    except ValueError as error:
        yield Finding("layout", str(error), "The run's own command with `--dry-run` reports the same without a cluster.")
        return
    print("", *lines, "", *aligned([("node", "devices that train", "devices that generate"), *rows]), sep="\n")


def _print_findings(found: Sequence[Finding]) -> int:
    grave = sum(finding.grave for finding in found)
    ordered = sorted(found, key=lambda finding: not finding.grave)
    print("", *finding_rows(ordered), sep="\n")
    if grave:
        print(f"\n{grave} problem{'s' if grave > 1 else ''}: a run would fail or misbehave.")
        return 1
    print("no problems found" if not found else "\nno problems that would stop a run")
    return 0
