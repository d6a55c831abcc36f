"""Sample a machine in a thread, and return means over the time between calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from strop.monitoring.machine.machine_reader import MachineReader
from strop.monitoring.machine.machine_reading import MachineReading, describe_machine

logger = logging.getLogger(__name__)


class ReadsMachine(Protocol):
    """A source of readings: the machine itself, or a test."""

    @property
    def gpu_names(self) -> tuple[str, ...]: ...

    def read(self) -> MachineReading: ...


class MachineMonitor:
    """Reads a machine every ``interval`` seconds until ``stop``. Also used in a process on each other node of a cluster."""

    def __init__(
        self,
        interval: float,
        folder: str | Path = ".",
        gpus: Sequence[str] | None = None,  # of a MachineReader
        reader: ReadsMachine | None = None,
    ) -> None:
        self._interval = interval
        self._reader = reader or MachineReader(folder, gpus=gpus)
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._before = self._reader.read()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine-monitor", daemon=True)
        self._thread.start()

    def list_gpus(self) -> tuple[str, ...]:
        """Return NVML's names of the GPUs, for a caller in another process."""
        return self._reader.gpu_names

    def sample(self) -> None:
        """Read the machine now, and add the activity since the last reading."""
        now = self._reader.read()
        found = describe_machine(self._before, now)
        self._before = now
        with self._lock:
            for name, value in found.items():
                self._sums[name] = self._sums.get(name, 0.0) + value
                self._counts[name] = self._counts.get(name, 0) + 1

    def drain(self) -> dict[str, float]:
        """Return the means of the samples since the last call; empty if there was none."""
        with self._lock:
            means = {name: value / self._counts[name] for name, value in self._sums.items()}
            self._sums, self._counts = {}, {}
        return means

    def stop(self) -> None:
        """End the thread, without waiting for a hanging reading."""
        self._stopped.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                self.sample()
            except Exception as error:  # the driver went away
                logger.warning("this machine is no longer monitored: %s: %s", type(error).__name__, error)
                return
