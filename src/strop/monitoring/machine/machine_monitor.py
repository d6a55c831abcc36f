"""Sample a machine in a thread, and return means over the time between calls."""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from strop.gpus import VISIBLE
from strop.monitoring.machine.machine_reading import GpuReading, MachineReading, describe_machine

SECTOR = 512  # bytes in /proc/diskstats, regardless of the disk's own sectors
DISKS = re.compile(r"(sd[a-z]+|hd[a-z]+|vd[a-z]+|xvd[a-z]+|nvme\d+n\d+|mmcblk\d+)$")  # whole disks, without partitions


class MachineReader:
    """Reads this machine. ``folder``: the disk whose free space is reported. ``proc``: another folder, for tests.

    ``gpus``: the indices or UUIDs of the GPUs to read; None: as in CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, folder: str | Path = ".", proc: Path = Path("/proc"), gpus: Sequence[str] | None = None) -> None:
        self._folder, self._proc = Path(folder).absolute(), proc
        self._gpus = _open_gpus(os.environ.get(VISIBLE, "").split(",") if gpus is None else gpus)

    @property
    def gpu_names(self) -> tuple[str, ...]:
        """NVML's names of the GPUs that are read."""
        return tuple(name for _, name in self._gpus)

    def read(self) -> MachineReading:
        """Read the machine once: takes about 0.2 ms, plus NVML's time for GPUs."""
        found: dict[str, Any] = {"seconds": time.monotonic()}
        for part in (self._read_processors, self._read_memory, self._read_disks, self._read_network):
            with suppress(OSError, ValueError, IndexError):  # not Linux, or a kernel with another format
                found |= part()
        with suppress(OSError):
            found["disk_free"] = float(shutil.disk_usage(self._folder).free)
        return MachineReading(**found, gpus=tuple(_read_gpu(handle) for handle, _ in self._gpus))

    def _read_processors(self) -> dict[str, float]:
        with (self._proc / "stat").open() as file:
            times = [int(word) for word in file.readline().split()[1:9]]  # guests' times are already included in user's
        hertz, idle = os.sysconf("SC_CLK_TCK"), times[3] + times[4]
        return {"cpu_busy": (sum(times) - idle) / hertz, "cpu_total": sum(times) / hertz}

    def _read_memory(self) -> dict[str, float]:
        lines = (line.split() for line in (self._proc / "meminfo").read_text().splitlines())
        values = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
        pages = int((self._proc / "self" / "statm").read_text().split()[1])
        total = float(values["MemTotal"])
        return {
            "memory": total - values["MemAvailable"],
            "memory_total": total,
            "process_memory": float(pages * os.sysconf("SC_PAGE_SIZE")),
        }

    def _read_disks(self) -> dict[str, float]:
        rows = [line.split() for line in (self._proc / "diskstats").read_text().splitlines()]
        disks = [row for row in rows if DISKS.match(row[2])]
        return {
            "disk_read": float(SECTOR * sum(int(row[5]) for row in disks)),
            "disk_written": float(SECTOR * sum(int(row[9]) for row in disks)),
        }

    def _read_network(self) -> dict[str, float]:
        received = sent = 0
        for line in (self._proc / "net" / "dev").read_text().splitlines()[2:]:
            name, _, counts = line.partition(":")
            if name.strip() != "lo":
                words = counts.split()
                received, sent = received + int(words[0]), sent + int(words[8])
        return {"network_received": float(received), "network_sent": float(sent)}


def _open_gpus(chosen: Sequence[str]) -> Sequence[tuple[Any, str]]:
    """Return NVML's handles and names of the chosen GPUs, or of all if one of them is not found. Empty without NVML."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
    except pynvml.NVMLError as error:
        logger.debug("GPUs are not monitored: %s", error)
        return ()
    texts = [name.decode() if isinstance(name, bytes) else str(name) for name in names]
    found = [_find_gpu(word.strip(), handles) for word in chosen]
    indices = [index for index in found if index is not None]
    return [(handles[index], texts[index]) for index in (indices if indices and None not in found else range(len(handles)))]


def _find_gpu(word: str, handles: Sequence[Any]) -> int | None:
    """Return the index of the GPU named in CUDA_VISIBLE_DEVICES by a number or a UUID prefix."""
    import pynvml

    if word.isdecimal():
        return int(word) if int(word) < len(handles) else None
    for index, handle in enumerate(handles if word.startswith("GPU-") else ()):
        with suppress(pynvml.NVMLError):
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            if (uuid.decode() if isinstance(uuid, bytes) else str(uuid)).startswith(word):
                return index
    return None  # a MIG slice, or one no longer present


def _read_gpu(handle: Any) -> GpuReading:
    """Query each value separately, because a MIG slice or an older driver rejects some."""
    import pynvml

    found: dict[str, float] = {}
    with suppress(pynvml.NVMLError):
        found["utilization"] = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    with suppress(pynvml.NVMLError):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        found |= {"memory": float(memory.used), "memory_total": float(memory.total)}
    with suppress(pynvml.NVMLError):
        found["power"] = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
    with suppress(pynvml.NVMLError):
        found["temperature"] = float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
    return GpuReading(**found)


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
