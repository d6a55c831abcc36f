"""Preflight checks: find out from what the nodes of a cluster report whether a run can start on it. Independent of Ray.

``strop.distributed.node_probe`` collects the reports; ``find_problems`` turns them into findings, each with a fix. A fatal finding
means that a run would fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

SMALL_SHM = 1.0  # GiB; NCCL and Ray share memory through /dev/shm, which has 0.06 GiB in a container by default
SMALL_DISK = 5.0  # GiB
MAX_SKEW = 1.0  # seconds
SLOW_NODE = 0.5  # fraction of the median link speed of all nodes
SLOW_GPU_LINK = 2e9  # bytes/s between nodes; below it NCCL has most likely fallen back to TCP


@dataclass(frozen=True)
class Finding:
    """A problem or warning of the preflight check."""

    where: str  # the node, the folder, ...
    problem: str
    fix: str
    fatal: bool = True  # False: a warning


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """What every node must report."""

    packages: tuple[str, ...] = ()  # to report the versions of
    models: tuple[str, ...] = ()  # folders or names on the hub
    folders: tuple[str, ...] = ()  # that must be shared
    token: str = ""  # written by the driver to a subfolder of this name in each folder


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
    free: float = 0.0  # GiB
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """Hardware and software of a node, as reported by a process on it."""

    host: str
    versions: Mapping[str, str]  # package -> version; empty: not installed
    cores: int
    memory: float  # GiB
    shm: float  # GiB of /dev/shm; 0: does not exist
    gpus: tuple[Gpu, ...] = ()
    models: Mapping[str, str] = field(default_factory=dict)  # name -> why it cannot be read; empty: it can be
    folders: Mapping[str, FolderStatus] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """A node and what it reported."""

    number: int  # among the nodes of the run, in the order of ranks
    address: str
    cpus: float  # that Ray schedules
    gpus: int  # that Ray schedules
    info: NodeInfo | None
    failure: str = ""  # why there is no info
    skew: float | None = None  # seconds that its clock is ahead of the driver's
    skew_error: float = 0.0  # seconds

    @property
    def name(self) -> str:
        return f"node {self.number} ({self.address})"


@dataclass(frozen=True, kw_only=True)
class LinkSpeeds:
    """Speed of the links between nodes, measured with one rank on each; on a single node, between its devices."""

    backend: str
    nodes: tuple[int, ...]  # node of each rank
    latency: float  # seconds of an all-reduce of a few numbers
    size: int  # bytes of the large all-reduce
    bandwidth: float  # bytes/s that each rank sends and receives in the large all-reduce
    ring: tuple[float, ...] = ()  # bytes/s from each rank to the next one and back

    def best_link(self, rank: int) -> float:
        """Return the speed of the faster of a rank's two links. Both are slow only if the node of the rank itself is slow."""
        return max(self.ring[rank], self.ring[rank - 1])


@dataclass(frozen=True, kw_only=True)
class ClusterSurvey:
    """All results of inspecting a cluster."""

    driver: Mapping[str, str]  # package -> version
    nodes: Sequence[NodeReport]
    devices: int  # required on each node
    on_cpu: bool
    # folder -> nodes whose files the driver found in it
    visible_files: Mapping[str, frozenset[int]] = field(default_factory=dict)
    unwritable: Mapping[str, str] = field(default_factory=dict)  # folder -> why the driver cannot write there
    folder_keys: Mapping[str, str] = field(default_factory=dict)  # folder -> its key in the configuration
    links: LinkSpeeds | None = None
    links_failure: str = ""


def find_problems(survey: ClusterSurvey) -> list[Finding]:
    """Return all findings, problems before warnings."""
    findings = [
        *check_responses(survey),
        *check_versions(survey),
        *check_gpus(survey),
        *check_folders(survey),
        *check_models(survey),
        *check_shared_memory(survey),
        *check_clocks(survey),
        *check_links(survey),
    ]
    return sorted(findings, key=lambda finding: not finding.fatal)


def _reporting_nodes(survey: ClusterSurvey) -> Iterator[tuple[NodeReport, NodeInfo]]:
    for node in survey.nodes:
        if node.info is not None:
            yield node, node.info


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
        if node.gpus < survey.devices:
            known = f", though the machine has {installed}" if installed > node.gpus else ""
            yield Finding(
                node.name,
                f"{node.gpus} GPUs{known}, and cluster.gpus_per_node is {survey.devices}",
                f"Start Ray there with --num-gpus={installed}." if known else "Lower cluster.gpus_per_node, or use another node.",
            )
        elif installed < node.gpus:
            yield Finding(
                node.name,
                f"Ray schedules {node.gpus} GPUs, and nvidia-smi finds {installed}",
                "Start Ray there with the number of GPUs that the machine has (--num-gpus), or repair its driver.",
                fatal=installed < survey.devices,
            )
    models = {gpu for _, info in _reporting_nodes(survey) for gpu in info.gpus}
    if not survey.on_cpu and len(models) > 1:
        names = "; ".join(sorted(f"{gpu.name}, {gpu.memory:.0f} GiB, driver {gpu.driver}" for gpu in models))
        fix = "Use nodes with the same GPUs: the slowest sets the speed, and the smallest the memory."
        yield Finding("GPUs", f"they are not all the same: {names}", fix, fatal=False)


def check_folders(survey: ClusterSurvey) -> Iterator[Finding]:
    free: dict[str, float] = {}
    for folder, reason in survey.unwritable.items():
        key = survey.folder_keys.get(folder, "the folder")
        yield Finding(key, f"{folder} cannot be written from here ({reason})", f"Set {key} to a writable folder.")
    for node, info in _reporting_nodes(survey):
        for folder, status in info.folders.items():
            key = survey.folder_keys.get(folder, "the folder")
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
            free[folder] = status.free
    for folder, free_gib in free.items():
        if 0 < free_gib < SMALL_DISK:
            key = survey.folder_keys.get(folder, "the folder")
            yield Finding(
                key,
                f"{free_gib:.1f} GiB are free in {folder}",
                "Free some space, or keep fewer checkpoints (checkpointing.keep_top_k).",
                fatal=False,
            )


def check_models(survey: ClusterSurvey) -> Iterator[Finding]:
    for node, info in _reporting_nodes(survey):
        for name, reason in info.models.items():
            if reason:
                yield Finding(
                    node.name,
                    f"cannot read the model {name}: {reason}",
                    "Put it on a shared disk under the same absolute path on every node, or into each node's hub cache (HF_HOME).",
                )


def check_shared_memory(survey: ClusterSurvey) -> Iterator[Finding]:
    for node, info in _reporting_nodes(survey):
        if info.shm < SMALL_SHM:
            yield Finding(
                node.name,
                f"/dev/shm has {info.shm:.2f} GiB, and the processes of a node exchange tensors through it",
                "Start the container with more (docker --shm-size=16g; an emptyDir with medium: Memory on Kubernetes).",
                fatal=False,
            )


def check_clocks(survey: ClusterSurvey) -> Iterator[Finding]:
    for node in survey.nodes:
        if node.skew is not None and abs(node.skew) > MAX_SKEW + node.skew_error:
            yield Finding(
                node.name,
                f"its clock is {abs(node.skew):.1f} s {'ahead of' if node.skew > 0 else 'behind'} the driver's",
                "Synchronize it with chrony or ntpd; until then, times in the logs of different nodes cannot be compared.",
                fatal=False,
            )


def check_links(survey: ClusterSurvey) -> Iterator[Finding]:
    if survey.links_failure:
        yield Finding(
            "interconnect",
            survey.links_failure,
            "Open all ports between the nodes, and set the network interface that they share: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME "
            "(cluster.roles.learner.env_vars); NCCL_DEBUG=INFO prints details.",
        )
    links = survey.links
    if links is None:
        return
    names = {node.number: node.name for node in survey.nodes}
    if len(links.ring) > 2:
        best = [links.best_link(rank) for rank in range(len(links.ring))]
        typical = median(best)
        for rank, speed in enumerate(best):
            if speed < SLOW_NODE * typical:
                yield Finding(
                    names.get(links.nodes[rank], f"node {links.nodes[rank]}"),
                    (
                        f"has slow links: {format_rate(speed)} at best, and the median of all nodes is "
                        f"{format_rate(typical)}; every step waits for it"
                    ),
                    "Use another node, or check its network card, cable and GPUs.",
                    fatal=False,
                )
    if links.backend == "nccl" and len(set(links.nodes)) > 1 and links.bandwidth < SLOW_GPU_LINK:
        yield Finding(
            "interconnect",
            f"{format_rate(links.bandwidth)} between GPUs of different nodes is the speed of an ordinary network",
            "Check with NCCL_DEBUG=INFO whether NCCL uses InfiniBand or RoCE (NCCL_IB_HCA, NCCL_SOCKET_IFNAME).",
            fatal=False,
        )


# --- as text ---------------------------------------------------------------------------------------------------------------------------


def format_rate(speed: float) -> str:
    """Format bytes/s as 1.3 GB/s or 87 MB/s."""
    return f"{speed / 1e9:.1f} GB/s" if speed >= 1e9 else f"{speed / 1e6:.0f} MB/s"


def format_duration(seconds: float) -> str:
    """Format a short duration as 12 us, 1.3 ms or 1.4 s."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines with aligned columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def format_nodes(survey: ClusterSurvey) -> list[str]:
    """Format a table with a header and one line per node."""
    header = ("node", "address", "host", "cores", "memory", "/dev/shm", "GPUs", "clock")
    return align_columns([header, *(_format_node(node) for node in survey.nodes)])


def _format_node(node: NodeReport) -> tuple[str, ...]:
    clock = "?" if node.skew is None else f"{node.skew:+.2f} s"
    if node.info is None:
        return str(node.number), node.address, "no answer", "?", "?", "?", f"{node.gpus} (Ray)", clock
    info = node.info
    size = (f"{info.cores}", f"{info.memory:.1f} GiB", f"{info.shm:.1f} GiB")
    return str(node.number), node.address, info.host, *size, _format_gpus(node, info), clock


def _format_gpus(node: NodeReport, info: NodeInfo) -> str:
    counts: dict[Gpu, int] = {}
    for gpu in info.gpus:
        counts[gpu] = counts.get(gpu, 0) + 1
    names = [f"{count} x {gpu.name}, {gpu.memory:.0f} GiB, driver {gpu.driver}" for gpu, count in counts.items()]
    if node.gpus != len(info.gpus):
        names.append(f"{node.gpus} for Ray")
    return "; ".join(names) or "none"


def format_links(links: LinkSpeeds) -> list[str]:
    """Format the measured link speeds."""
    ranks = f"{len(links.nodes)} ranks on {len(set(links.nodes))} node{'s' if len(set(links.nodes)) > 1 else ''}"
    rows = [
        f"{links.backend}, {ranks}: an all-reduce of a few numbers takes {format_duration(links.latency)}, one of "
        f"{links.size / 2**20:.0f} MiB runs at {format_rate(links.bandwidth)} per rank"
    ]
    if len(links.ring) > 2:
        pairs = [
            f"{links.nodes[rank]}-{links.nodes[(rank + 1) % len(links.nodes)]} {format_rate(speed)}"
            for rank, speed in enumerate(links.ring)
        ]
        rows.append(f"from node to node: {', '.join(pairs)}")
    return rows


def format_findings(findings: Sequence[Finding]) -> list[str]:
    """Format findings, two lines each: what was found, and how to fix it."""
    rows: list[str] = []
    for finding in findings:
        rows += [f"{'problem' if finding.fatal else 'warning'}  {finding.where}: {finding.problem}", f"         {finding.fix}"]
    return rows
