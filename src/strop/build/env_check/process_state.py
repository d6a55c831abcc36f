"""What a process has open and what is set in it, to compare before and after."""

from __future__ import annotations

import gc
import locale
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch


@dataclass(frozen=True)
class OpenResources:
    """Counts of what a process can leave behind, and its memory in bytes."""

    processes: int
    threads: int
    files: int
    sockets: int
    temporary_files: int
    python_memory: int
    memory: int

    @staticmethod
    def count() -> OpenResources:
        gc.collect()
        targets = [_read_link(path) for path in _list(Path("/proc/self/fd"))]
        sockets = sum(target.startswith("socket:") for target in targets)
        pages = Path("/proc/self/statm").read_text().split()[1] if Path("/proc/self/statm").exists() else "0"
        return OpenResources(
            processes=sum(len(_read(thread / "children").split()) for thread in _list(Path("/proc/self/task"))),
            threads=threading.active_count(),
            files=len(targets) - sockets,
            sockets=sockets,
            temporary_files=sum(len(names) + len(folders) for _, folders, names in os.walk(tempfile.gettempdir())),
            python_memory=tracemalloc.get_traced_memory()[0],
            memory=int(pages) * os.sysconf("SC_PAGE_SIZE"),
        )

    def growth(self, before: OpenResources) -> dict[str, int]:
        return {item.name: getattr(self, item.name) - getattr(before, item.name) for item in fields(self)}


def _list(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


@contextmanager
def own_temporary_folder() -> Iterator[None]:
    """Let ``tempfile`` use a new folder, where other processes leave nothing."""
    before = tempfile.tempdir
    with TemporaryDirectory(prefix="strop-env-check-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before


@contextmanager
def traced_memory() -> Iterator[None]:
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start(1)
    try:
        yield
    finally:
        if not tracing:
            tracemalloc.stop()


GlobalState = dict[str, Any]


def read_global_state() -> GlobalState:
    """Return what all code of a process shares, by what it is called in messages."""
    mask = os.umask(0)
    os.umask(mask)
    numbers = numpy.random.get_state(legacy=True)
    return {
        "the working directory": os.getcwd(),
        "environment variables": dict(os.environ),
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "the state of random": random.getstate(),
        "the state of numpy.random": (numbers[1].tolist(), *numbers[2:]),  # type: ignore[union-attr, index]
        "the state of torch's generator": torch.get_rng_state().tolist(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "the umask": mask,
        "the recursion limit": sys.getrecursionlimit(),
        "the locale": locale.setlocale(locale.LC_ALL),
        "the default timeout of sockets": socket.getdefaulttimeout(),
        "sys.stdout": id(sys.stdout),
    }


def restore_global_state(state: GlobalState) -> None:
    """Set back what later checks would trip over."""
    os.chdir(state["the working directory"])
    random.setstate(state["the state of random"])
    torch.set_default_dtype(state["torch's default dtype"])
    for name in set(os.environ) - set(state["environment variables"]):
        del os.environ[name]
    os.environ.update(state["environment variables"])
    for number, handler in state["signal handlers"].items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def describe_changes(before: GlobalState, after: GlobalState) -> list[str]:
    """Return what differs, environment variables by name."""
    changed = [name for name in before if before[name] != after[name]]
    variables = before["environment variables"], after["environment variables"]
    names = sorted(name for name in {*variables[0], *variables[1]} if variables[0].get(name) != variables[1].get(name))
    return [f"{name} ({', '.join(names)})" if name == "environment variables" else name for name in changed]
