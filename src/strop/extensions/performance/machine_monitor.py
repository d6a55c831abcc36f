"""Sample a machine in a thread, return means over the time between calls, and notice others on the cores of a run on a CPU."""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from strop.gpus import VISIBLE

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


GIB = 1 << 30
MB = 1_000_000


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """One GPU at one moment. None: not reported by its driver."""

    utilization: float | None = None  # percent of the recent sampling period in which a kernel ran
    memory: float | None = None  # bytes in use
    memory_total: float | None = None
    power: float | None = None  # watts
    temperature: float | None = None  # degrees Celsius


@dataclass(frozen=True, kw_only=True)
class MachineReading:
    """A machine at one moment. Counters start at boot; None: not reported by this system."""

    seconds: float  # when
    cpu_busy: float | None = None  # seconds of all processors
    cpu_total: float | None = None
    memory: float | None = None  # bytes in use
    memory_total: float | None = None
    process_memory: float | None = None  # bytes of this process
    disk_free: float | None = None  # bytes, where the log folder is
    disk_read: float | None = None  # bytes since the start
    disk_written: float | None = None
    network_received: float | None = None
    network_sent: float | None = None
    gpus: tuple[GpuReading, ...] = ()


def describe_machine(before: MachineReading, now: MachineReading) -> dict[str, float]:
    """Return the metrics of a machine between two readings: percentages, GiB, MB (10^6 bytes) per second, watts."""
    found: dict[str, float | None] = {
        "cpu_percent": _share(before, now),
        "memory_gib": _scaled(now.memory, GIB),
        "memory_percent": None if now.memory is None or not now.memory_total else 100 * now.memory / now.memory_total,
        "process_memory_gib": _scaled(now.process_memory, GIB),
        "disk_free_gib": _scaled(now.disk_free, GIB),
    }
    for name in ("disk_read", "disk_written", "network_received", "network_sent"):
        found[f"{name}_mb_per_sec"] = _rate(getattr(before, name), getattr(now, name), now.seconds - before.seconds)
    for index, gpu in enumerate(now.gpus):
        found |= {
            f"gpu_{index}/utilization_percent": gpu.utilization,
            f"gpu_{index}/memory_gib": _scaled(gpu.memory, GIB),
            f"gpu_{index}/memory_percent": None
            if gpu.memory is None or not gpu.memory_total
            else 100 * gpu.memory / gpu.memory_total,
            f"gpu_{index}/power_watts": gpu.power,
            f"gpu_{index}/temperature_celsius": gpu.temperature,
        }
    return {name: value for name, value in found.items() if value is not None}


def _share(before: MachineReading, now: MachineReading) -> float | None:
    if before.cpu_busy is None or now.cpu_busy is None or before.cpu_total is None or now.cpu_total is None:
        return None
    total = now.cpu_total - before.cpu_total
    return min(100.0, max(0.0, 100 * (now.cpu_busy - before.cpu_busy) / total)) if total > 0 else None  # the kernel rounds


def _rate(before: float | None, now: float | None, seconds: float) -> float | None:
    """Return MB per second; None for a counter that was reset (an interface was removed)."""
    return None if before is None or now is None or now < before or seconds <= 0 else (now - before) / MB / seconds


def _scaled(value: float | None, unit: int) -> float | None:
    return None if value is None else value / unit


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


Ask = Callable[[], Mapping[str, float]]  # a node's measurements since the last query; may take long, or raise


class SystemMonitor:
    """``metrics`` returns ``system/node_0/cpu_percent`` and similar: means since the last call. It never blocks."""

    def __init__(
        self,
        own: MachineMonitor | None,
        others: Mapping[int, Ask] | None = None,
        *,
        interval: float = 10.0,
        gpu_names: Sequence[str] = (),
    ) -> None:
        """``own``: node 0. ``others``: other nodes by number, queried every ``interval`` seconds."""
        self.gpu_names = tuple(gpu_names)  # of a node that has GPUs, by NVML
        self._own, self._others, self._interval = own, dict(others or {}), interval
        self._lock = threading.Lock()
        self._reports: dict[int, list[Mapping[str, float]]] = {}
        self._stopped = threading.Event()
        for node in self._others:  # so that a hanging node does not delay the others
            threading.Thread(target=self._ask, args=(node,), name=f"node-monitor-{node}", daemon=True).start()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the machines since the last call; nothing for a machine that was not sampled since."""
        found = {} if self._own is None else {f"system/node_0/{name}": value for name, value in self._own.drain().items()}
        with self._lock:
            reports, self._reports = self._reports, {}
        for node, each in reports.items():
            for name in sorted({name for report in each for name in report}):
                values = [report[name] for report in each if name in report]
                found[f"system/node_{node}/{name}"] = sum(values) / len(values)
        return found

    def stop(self) -> None:
        self._stopped.set()
        if self._own is not None:
            self._own.stop()

    def _ask(self, node: int) -> None:
        while not self._stopped.wait(self._interval):
            try:
                report = self._others[node]()
            except Exception as error:
                if not self._stopped.is_set():
                    logger.warning("node %d is no longer monitored: %s: %s", node, type(error).__name__, error)
                return
            if report:
                with self._lock:
                    self._reports.setdefault(node, []).append(report)
