"""A run says once that others take its cores."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from strop.extensions.performance import machine_monitor
from strop.extensions.performance.machine_monitor import CoreReader, CoreTimes, SharedCores

FOREIGN = "import os, time\nif os.fork() == 0:\n    print(os.getpid(), flush=True)\n    while True: pass\n"


@contextmanager
def busy_stranger() -> Iterator[None]:
    """A process that is always busy and that this one did not start: its parent has ended."""
    with subprocess.Popen([sys.executable, "-c", FOREIGN], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        stranger = int(starter.stdout.readline())
        starter.wait()
        try:
            yield
        finally:
            os.kill(stranger, signal.SIGKILL)


@contextmanager
def one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def test_a_busy_process_on_the_same_core_is_noticed_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine_monitor, "LEAST_SECONDS", 0.5)
    with one_core(), busy_stranger():
        shared = SharedCores()
        found = []
        for _ in range(3):
            end = time.monotonic() + 0.6
            while time.monotonic() < end:
                sum(range(1000))
            found.append(shared.check())
    said = [message for message in found if message is not None]
    assert len(said) == 1 and len([each for each in caplog.records if each.levelno == logging.WARNING]) == 1
    assert "of this run's 1 core, and its threads wait for them" in said[0] and "taskset --cpu-list" in said[0]


class Readings(CoreReader):
    """Two seconds between readings, with what the second adds to busy, own and waiting."""

    def __init__(self, busy: float, own: float, waiting: float) -> None:
        super().__init__()
        start = time.monotonic() - 2.5
        self.left = [CoreTimes(start, 5.0, 3.0, 1.0), CoreTimes(start + 2, 5.0 + busy, 3.0 + own, 1.0 + waiting)]

    def read(self) -> CoreTimes | None:
        return self.left.pop(0)


@pytest.mark.parametrize(
    ("busy", "own", "waiting", "warned"),
    [
        (3.9, 2.0, 1.2, True),
        (3.9, 3.8, 1.2, False),  # its own processes are too many
        (3.9, 2.0, 0.1, False),  # others use cores that it leaves alone
        (0.6, 0.5, 0.1, False),
    ],
)
def test_only_cores_that_others_use_and_the_run_waits_for_are_a_warning(
    busy: float, own: float, waiting: float, warned: bool
) -> None:
    assert (SharedCores(Readings(busy, own, waiting)).check() is not None) == warned


def test_processes_that_a_run_starts_are_its_own() -> None:
    reader = CoreReader()
    before = reader.read()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        time.sleep(0.6)
        now = reader.read()
        child.kill()
    assert before is not None and now is not None
    assert now.own - before.own > 0.1


def test_a_kernel_without_the_counters_is_no_error(tmp_path: Path) -> None:
    assert SharedCores(CoreReader(tmp_path)).check() is None
