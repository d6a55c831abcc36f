"""Notice that other processes take the cores of a run on a CPU: its steps become several times as long, and nothing else shows why."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

LEAST_SECONDS = 2.0  # of a reading: the kernel counts in hundredths of a second
LEAST_TAKEN = 0.5  # cores
LEAST_WAITING = 0.25  # threads of this process that could run and have no core, on average


@dataclass(frozen=True)
class CoreTimes:
    """Counters of this process and its cores at one moment, in seconds."""

    at: float
    busy: float  # of the cores that this process may use
    own: float  # of them, used by this process and the processes it started
    waiting: float  # this process's threads, for a core


class CoreReader:
    """Reads Linux's counters in about a millisecond. ``proc``: another folder, for tests."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc, self._hertz = proc, os.sysconf("SC_CLK_TCK")
        self.cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

    def read(self) -> CoreTimes | None:
        """Return the counters; None where the kernel does not have them."""
        try:
            own = sum(self._read_process(pid) for pid in self._iter_family("self"))
            return CoreTimes(time.monotonic(), self._read_busy(), own / self._hertz, self._read_waiting())
        except (OSError, ValueError, IndexError):
            return None

    def _read_busy(self) -> float:
        mine = {f"cpu{core}" for core in self.cores}
        rows = (line.split() for line in (self._proc / "stat").read_text().splitlines())
        times = [[int(word) for word in row[1:8]] for row in rows if row and row[0] in mine]
        return sum(sum(each) - each[3] - each[4] for each in times) / self._hertz  # without idle and iowait

    def _iter_family(self, pid: str) -> Iterator[str]:
        """Yield a process and all processes that it started and that still run."""
        yield pid
        with suppress(OSError):  # ended meanwhile
            for task in (self._proc / pid / "task").iterdir():
                for child in (task / "children").read_text().split():
                    yield from self._iter_family(child)

    def _read_process(self, pid: str) -> int:
        """Return the ticks of a process, and of those it started that have ended."""
        try:
            fields = (self._proc / pid / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0
        return sum(int(word) for word in fields[11:15])

    def _read_waiting(self) -> float:
        waited = 0
        for task in (self._proc / "self" / "task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                waited += int((task / "schedstat").read_text().split()[1])
        return waited / 1e9


class SharedCores:
    """Warns once if others take cores that this process waits for. Call ``check`` once a step."""

    def __init__(self, reader: CoreReader | None = None) -> None:
        self._reader = reader or CoreReader()
        self._before = self._reader.read()

    def check(self) -> str | None:
        """Log a warning and return it if the time since the last reading was a case of it, for the first time."""
        before = self._before
        if before is None or time.monotonic() - before.at < LEAST_SECONDS:
            return None
        now = self._before = self._reader.read()
        if now is None:
            return None
        seconds = now.at - before.at
        taken = (now.busy - before.busy - (now.own - before.own)) / seconds
        waiting = (now.waiting - before.waiting) / seconds
        if taken < LEAST_TAKEN or waiting < LEAST_WAITING:
            return None
        self._before = None  # once
        count = len(self._reader.cores)
        message = (
            f"other processes use {taken:.1f} of this run's {count} core{'s' if count > 1 else ''}, and its threads wait for them "
            f"{100 * min(1.0, waiting):.0f}% of the time: steps take longer. End those processes, or start the run on cores that they "
            "leave alone (taskset --cpu-list, or a container's --cpuset-cpus)"
        )
        log.warning("%s", message)
        return message
