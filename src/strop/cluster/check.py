"""Whether a cluster is fit for a run: what its nodes say of themselves, and what is to be thought of it. Nothing here knows Ray.

``strop.cluster.probe`` looks; ``judge`` turns what was seen into findings, each with what to do. A grave finding is a reason not to start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

SMALL_SHM = 1.0  # GiB; NCCL's and Ray's shared memory is in /dev/shm, of which a container has 0.06 unless it is told
SMALL_DISK = 5.0  # GiB
SKEW = 1.0  # seconds
SLOW_NODE = 0.5  # of the middle of all nodes
SLOW_GPU_LINK = 2e9  # bytes/s between nodes: below it NCCL has most likely fallen back to an ordinary network


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    where: str  # the node, the folder, ...
    found: str
    fix: str
    grave: bool = True  # else a warning


@dataclass(frozen=True, kw_only=True)
class Question:
    """What every node is asked."""

    packages: tuple[str, ...] = ()  # whose versions
    models: tuple[str, ...] = ()  # folders or names on the hub
    folders: tuple[str, ...] = ()  # that are to be shared
    token: str = ""  # what the driver wrote, into a folder of this name in each


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: float  # GiB
    driver: str


@dataclass(frozen=True)
class FolderSeen:
    """A folder as a node sees it."""

    shared: bool  # it reads what the driver wrote
    file: str = ""  # that it wrote itself
    free: float = 0.0  # GiB
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What a node says of itself."""

    host: str
    versions: Mapping[str, str]  # empty text: not there
    cores: int
    memory: float  # GiB
    shm: float  # GiB of /dev/shm; 0: there is none
    gpus: tuple[Gpu, ...] = ()
    models: Mapping[str, str] = field(default_factory=dict)  # name -> why it cannot be read; empty: it can
    folders: Mapping[str, FolderSeen] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """A node, with what it answered."""

    number: int  # among those the run takes, in the order of ranks
    address: str
    cpus: float  # that Ray may give away
    gpus: int  # that Ray may give away
    facts: NodeFacts | None
    failure: str = ""  # why there are none
    skew: float | None = None  # seconds that its clock is ahead of the driver's
    skew_error: float = 0.0

    @property
    def name(self) -> str:
        return f"node {self.number} ({self.address})"


@dataclass(frozen=True, kw_only=True)
class Links:
    """How fast the nodes are together, one rank on each; on a single node: its devices."""

    backend: str
    nodes: tuple[int, ...]  # of each rank
    latency: float  # seconds of an all-reduce of a few numbers
    size: int  # bytes of the large one
    bandwidth: float  # bytes/s that each rank sends and receives in it
    ring: tuple[float, ...] = ()  # bytes/s from each rank to the next one and back

    def best(self, rank: int) -> float:
        """The faster of a rank's two links: a slow node slows both of its neighbours' links, but only its own are slow together."""
        return max(self.ring[rank], self.ring[rank - 1])


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Everything that was seen."""

    driver: Mapping[str, str]  # versions
    nodes: Sequence[NodeReport]
    devices: int  # wanted on each node
    on_cpu: bool
    written: Mapping[str, frozenset[int]] = field(default_factory=dict)  # folder -> nodes whose files the driver found in it
    unwritable: Mapping[str, str] = field(default_factory=dict)  # folder -> why the driver cannot write there
    folder_keys: Mapping[str, str] = field(default_factory=dict)  # folder -> its key in the configuration
    links: Links | None = None
    links_failure: str = ""


def judge(survey: Survey) -> list[Finding]:
    """Everything that is wrong, the grave first."""
    found = [
        *silent(survey),
        *versions(survey),
        *devices(survey),
        *folders(survey),
        *models(survey),
        *shared_memory(survey),
        *clocks(survey),
        *connection(survey),
    ]
    return sorted(found, key=lambda finding: not finding.grave)


def _answered(survey: Survey) -> Iterator[tuple[NodeReport, NodeFacts]]:
    for node in survey.nodes:
        if node.facts is not None:
            yield node, node.facts


def silent(survey: Survey) -> Iterator[Finding]:
    for node in survey.nodes:
        if node.facts is None:
            yield Finding(
                node.name,
                f"gave no answer: {node.failure}",
                "Install there what is installed here (Strop, torch, transformers, Ray), in the environment that `ray start` was run in.",
            )


def versions(survey: Survey) -> Iterator[Finding]:
    for node, facts in _answered(survey):
        for package, own in survey.driver.items():
            there = facts.versions.get(package, "")
            if there != own:
                yield Finding(
                    node.name,
                    f"{package} {there or 'is not there'}, and here it is {own or 'not installed'}",
                    f"Install {package} {own} there." if own else f"Install {package} {there} here.",
                )


def devices(survey: Survey) -> Iterator[Finding]:
    for node, facts in _answered(survey):
        there = len(facts.gpus)
        if survey.on_cpu:
            if there and not node.gpus:
                yield Finding(
                    node.name,
                    f"has {there} GPUs that Ray does not know of, so the run would be on its CPU",
                    f"Start Ray there with --num-gpus={there}, or set policy.device=cpu.",
                    grave=False,
                )
            continue
        if node.gpus < survey.devices:
            known = f", though the machine has {there}" if there > node.gpus else ""
            yield Finding(
                node.name,
                f"{node.gpus} GPUs{known}, and cluster.gpus_per_node is {survey.devices}",
                f"Start Ray there with --num-gpus={there}." if known else "Lower cluster.gpus_per_node, or take another node.",
            )
        elif there < node.gpus:
            yield Finding(
                node.name,
                f"Ray gives away {node.gpus} GPUs, and nvidia-smi finds {there}",
                "Start Ray there with the number of GPUs that the machine has (--num-gpus), or see to its driver.",
                grave=there < survey.devices,
            )
    kinds = {gpu for _, facts in _answered(survey) for gpu in facts.gpus}
    if not survey.on_cpu and len(kinds) > 1:
        named = "; ".join(sorted(f"{gpu.name}, {gpu.memory:.0f} GiB, driver {gpu.driver}" for gpu in kinds))
        yield Finding("GPUs", f"they are not all alike: {named}", "All wait for the slowest and the smallest one.", grave=False)


def folders(survey: Survey) -> Iterator[Finding]:
    free: dict[str, float] = {}
    for folder, reason in survey.unwritable.items():
        key = survey.folder_keys.get(folder, "the folder")
        yield Finding(key, f"{folder} cannot be written from here ({reason})", f"Set {key} to a folder that can.")
    for node, facts in _answered(survey):
        for folder, seen in facts.folders.items():
            key = survey.folder_keys.get(folder, "the folder")
            if not seen.shared:
                yield Finding(
                    f"{key}, {node.name}",
                    f"{folder} is not the folder that the driver sees{f' ({seen.error})' if seen.error else ''}",
                    f"Set {key} to a folder on a disk that all nodes have mounted under the same path.",
                )
            elif node.number not in survey.written.get(folder, frozenset()):
                yield Finding(
                    f"{key}, {node.name}",
                    f"it can read {folder}, and what it writes there does not reach the driver"
                    + (f" ({seen.error})" if seen.error else ""),
                    "Give the user that Ray runs as the right to write there, and mount it read-write.",
                )
            free[folder] = seen.free
    for folder, gib in free.items():
        if 0 < gib < SMALL_DISK:
            key = survey.folder_keys.get(folder, "the folder")
            yield Finding(
                key,
                f"{gib:.1f} GiB are free in {folder}",
                "Make room, or keep fewer checkpoints (checkpointing.keep_top_k).",
                grave=False,
            )


def models(survey: Survey) -> Iterator[Finding]:
    for node, facts in _answered(survey):
        for name, reason in facts.models.items():
            if reason:
                yield Finding(
                    node.name,
                    f"cannot read the model {name}: {reason}",
                    "Put it where every node sees it under the same absolute path, or into each node's hub cache (HF_HOME).",
                )


def shared_memory(survey: Survey) -> Iterator[Finding]:
    for node, facts in _answered(survey):
        if facts.shm < SMALL_SHM:
            yield Finding(
                node.name,
                f"/dev/shm has {facts.shm:.2f} GiB, and processes of one node exchange tensors through it",
                "Start the container with more (docker --shm-size=16g; an emptyDir with medium: Memory on Kubernetes).",
                grave=False,
            )


def clocks(survey: Survey) -> Iterator[Finding]:
    for node in survey.nodes:
        if node.skew is not None and abs(node.skew) > SKEW + node.skew_error:
            yield Finding(
                node.name,
                f"its clock is {abs(node.skew):.1f} s {'ahead of' if node.skew > 0 else 'behind'} the driver's",
                "Let chrony or ntpd set it; until then times in logs of several nodes cannot be compared.",
                grave=False,
            )


def connection(survey: Survey) -> Iterator[Finding]:
    if survey.links_failure:
        yield Finding(
            "interconnect",
            survey.links_failure,
            "Open all ports between the nodes, and name the network interface that they share: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME "
            "(cluster.roles.learner.env_vars); NCCL_DEBUG=INFO says more.",
        )
    links = survey.links
    if links is None:
        return
    named = {node.number: node.name for node in survey.nodes}
    if len(links.ring) > 2:
        best = [links.best(rank) for rank in range(len(links.ring))]
        middle = median(best)
        for rank, speed in enumerate(best):
            if speed < SLOW_NODE * middle:
                yield Finding(
                    named.get(links.nodes[rank], f"node {links.nodes[rank]}"),
                    f"is slow to reach: {rate(speed)} at best, and {rate(middle)} in the middle of all nodes; every step waits for it",
                    "Take another node, or see to its network card, cable and GPUs.",
                    grave=False,
                )
    if links.backend == "nccl" and len(set(links.nodes)) > 1 and links.bandwidth < SLOW_GPU_LINK:
        yield Finding(
            "interconnect",
            f"{rate(links.bandwidth)} between GPUs of different nodes is what an ordinary network gives",
            "See with NCCL_DEBUG=INFO whether InfiniBand or RoCE is used (NCCL_IB_HCA, NCCL_SOCKET_IFNAME).",
            grave=False,
        )


# --- as text ---------------------------------------------------------------------------------------------------------------------------


def rate(speed: float) -> str:
    """Bytes/s as 1.3 GB/s or 87 MB/s."""
    return f"{speed / 1e9:.1f} GB/s" if speed >= 1e9 else f"{speed / 1e6:.0f} MB/s"


def moment(seconds: float) -> str:
    """Of a short one: 12 us, 1.3 ms, 0.4 s."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns, two blanks apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def node_rows(survey: Survey) -> list[str]:
    """A line for each node, under a line of headings."""
    heading = ("node", "address", "host", "cores", "memory", "/dev/shm", "GPUs", "clock")
    return aligned([heading, *(_row(node) for node in survey.nodes)])


def _row(node: NodeReport) -> tuple[str, ...]:
    clock = "?" if node.skew is None else f"{node.skew:+.2f} s"
    if node.facts is None:
        return str(node.number), node.address, "no answer", "?", "?", "?", f"{node.gpus} (Ray)", clock
    facts = node.facts
    size = (f"{facts.cores}", f"{facts.memory:.1f} GiB", f"{facts.shm:.1f} GiB")
    return str(node.number), node.address, facts.host, *size, _gpus(node, facts), clock


def _gpus(node: NodeReport, facts: NodeFacts) -> str:
    kinds: dict[Gpu, int] = {}
    for gpu in facts.gpus:
        kinds[gpu] = kinds.get(gpu, 0) + 1
    named = [f"{count} x {gpu.name}, {gpu.memory:.0f} GiB, driver {gpu.driver}" for gpu, count in kinds.items()]
    if node.gpus != len(facts.gpus):
        named.append(f"{node.gpus} for Ray")
    return "; ".join(named) or "none"


def link_rows(links: Links) -> list[str]:
    """What was measured, in plain units."""
    ranks = f"{len(links.nodes)} ranks on {len(set(links.nodes))} node{'s' if len(set(links.nodes)) > 1 else ''}"
    rows = [
        f"{links.backend}, {ranks}: an all-reduce of a few numbers takes {moment(links.latency)}, one of "
        f"{links.size / 2**20:.0f} MiB runs at {rate(links.bandwidth)} for each rank"
    ]
    if len(links.ring) > 2:
        pairs = [
            f"{links.nodes[rank]}-{links.nodes[(rank + 1) % len(links.nodes)]} {rate(speed)}"
            for rank, speed in enumerate(links.ring)
        ]
        rows.append(f"from node to node: {', '.join(pairs)}")
    return rows


def finding_rows(found: Sequence[Finding]) -> list[str]:
    """Problems, then warnings: what was found, and under it what to do."""
    rows: list[str] = []
    for finding in found:
        rows += [f"{'problem' if finding.grave else 'warning'}  {finding.where}: {finding.found}", f"         {finding.fix}"]
    return rows
