"""Find the processes of a run over Ray, and those left after it has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from loop.runs import heed_interrupts

MARK = "STROP_TEST_RUN"  # an environment variable that all processes of a run inherit


@dataclass(frozen=True)
class Marked:
    """For ``before``: set the mark and restore the Ctrl-C handler."""

    mark: str

    def __call__(self) -> None:
        os.environ[MARK] = self.mark
        os.environ["SPT_NOENV"] = "1"  # otherwise the process titles set by Ray would overwrite it
        heed_interrupts()


def find_processes(mark: str) -> list[psutil.Process]:
    """Return all processes started with the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and is_alive(process):
                found.append(process)
    return found


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def find_worker(name: str, mark: str) -> psutil.Process | None:
    """Find a process of a run by its name, such as learner-0, which is the name of its output file."""
    for process in find_processes(mark):
        with suppress(psutil.Error, OSError):
            if Path(os.readlink(f"/proc/{process.pid}/fd/1")).stem == name:
                return process
    return None


def find_program(names: Sequence[str], mark: str) -> psutil.Process | None:
    """Find a process of a run by its program name."""
    for process in find_processes(mark):
        with suppress(psutil.Error):
            if process.name().startswith(tuple(names)):
                return process
    return None


def wait_for_exit(mark: str, known: Iterable[psutil.Process] = (), seconds: float = 15.0) -> tuple[list[psutil.Process], float]:
    """Wait up to ``seconds`` for all processes of a run, and ``known`` ones, to exit. Returns those left and the time waited."""
    began, others = time.monotonic(), list(known)
    while True:
        alive = {process.pid: process for process in [*find_processes(mark), *filter(is_alive, others)]}
        waited = time.monotonic() - began
        if not alive or waited > seconds:
            return list(alive.values()), waited
        time.sleep(0.1)


def describe_processes(processes: Sequence[psutil.Process]) -> str:
    found = []
    for process in processes:
        with suppress(psutil.Error):
            found.append(f"{process.pid} {' '.join(' '.join(process.cmdline()).split())[:100] or process.name()}")
    return "; ".join(found)
