"""Monitors of machines: what is read, what is made of it, and that a GPU, a node or a driver that goes away stops nothing."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strop.config import load_config
from strop.distributed.base import ActorOptions
from strop.extensions.performance.machine_monitor import (
    GpuReading,
    MachineMonitor,
    MachineReader,
    MachineReading,
    SystemMonitor,
    describe_machine,
)
from strop.extensions.performance.performance import watch_machines
from strop.extensions.recorded.recorded_config import SftRunConfig


class FakeNvml(SimpleNamespace):
    """Stands for pynvml, with two GPUs. The second one refuses to say its power, as a MIG slice does."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_TEMPERATURE_GPU = 0

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}f3a-0000"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=90 - handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=40 << 30, total=80 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle:
            raise self.NVMLError
        return 650_000

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return 60


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def write_proc(folder: Path, *, busy: int, idle: int, received: int, sectors: int) -> Path:
    (folder / "net").mkdir(parents=True, exist_ok=True)
    (folder / "self").mkdir(exist_ok=True)
    (folder / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3\n")
    (folder / "meminfo").write_text("MemTotal:  4194304 kB\nMemFree: 1 kB\nMemAvailable:  1048576 kB\nHugePages_Total: 0\n")
    (folder / "self" / "statm").write_text("1000 256 0 0 0 0 0\n")
    (folder / "diskstats").write_text(
        f"259 0 nvme0n1 1 0 {sectors} 0 1 0 {2 * sectors} 0 0 0 0\n259 1 nvme0n1p1 1 0 {sectors} 0 1 0 {sectors} 0 0 0 0\n"
    )
    (folder / "net" / "dev").write_text(
        f"Inter-|\n face |\n    lo: 999 0 0 0 0 0 0 0 999 0\n  eth0: {received} 0 0 0 0 0 0 0 {received // 2} 0\n"
    )
    return folder


def test_a_machine_is_read_from_proc(tmp_path: Path) -> None:
    proc = write_proc(tmp_path / "proc", busy=100, idle=300, received=1_000_000, sectors=0)
    reader = MachineReader(tmp_path, proc)
    before = reader.read()
    write_proc(proc, busy=175, idle=325, received=5_000_000, sectors=10_000)
    now = reader.read()
    found = describe_machine(before, MachineReading(**{**vars(now), "seconds": before.seconds + 2.0}))
    assert found["cpu_percent"] == 75.0
    assert found["memory_gib"] == 3.0 and found["memory_percent"] == 75.0
    assert found["network_received_mb_per_sec"] == 2.0 and found["network_sent_mb_per_sec"] == 1.0  # without lo
    assert found["disk_read_mb_per_sec"] == 2.56 and found["disk_written_mb_per_sec"] == 5.12  # partitions are not counted again
    assert found["disk_free_gib"] > 0 and found["process_memory_gib"] > 0


@pytest.mark.usefixtures("nvml")
def test_gpus_are_read_and_what_one_refuses_to_say_is_left_out(tmp_path: Path) -> None:
    reader = MachineReader(tmp_path)
    assert reader.gpu_names == ("NVIDIA H100 80GB HBM3",) * 2
    found = describe_machine(reader.read(), reader.read())
    assert found["gpu_0/utilization_percent"] == 90 and found["gpu_1/utilization_percent"] == 89
    assert found["gpu_0/memory_gib"] == 40 and found["gpu_0/memory_percent"] == 50
    assert found["gpu_0/power_watts"] == 650 and "gpu_1/power_watts" not in found


@pytest.mark.usefixtures("nvml")
def test_only_the_gpus_of_the_run_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert MachineReader().read().gpus[0].utilization == 89
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5f3a")  # names no GPU that is here: all
    assert len(MachineReader().read().gpus) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1f3a")
    assert [gpu.utilization for gpu in MachineReader().read().gpus] == [89]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as in a process of a cluster, which is told which
    assert [gpu.utilization for gpu in MachineReader(gpus=("1", "0")).read().gpus] == [89, 90]


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = FakeNvml()

    def refuse() -> None:
        raise FakeNvml.NVMLError("Driver Not Loaded")

    broken.nvmlInit = refuse  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert MachineReader().gpu_names == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert MachineReader().gpu_names == ()


class Scripted:
    """Gives readings with these memories, a second apart, then fails."""

    gpu_names = ()

    def __init__(self, *memories: float) -> None:
        self.left = list(enumerate(memories))

    def read(self) -> MachineReading:
        if not self.left:
            raise RuntimeError("the driver went away")
        seconds, memory = self.left.pop(0)
        return MachineReading(seconds=float(seconds), memory=memory * (1 << 30), gpus=(GpuReading(utilization=10 * memory),))


def test_a_step_gets_the_means_since_the_last_one() -> None:
    monitor = MachineMonitor(3600.0, reader=Scripted(1, 2, 4, 5))
    monitor.sample()
    monitor.sample()
    assert monitor.drain() == {"memory_gib": 3.0, "gpu_0/utilization_percent": 30.0}
    assert monitor.drain() == {}
    monitor.sample()
    assert monitor.drain()["memory_gib"] == 5.0
    monitor.stop()


def test_a_driver_that_goes_away_is_said_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    monitor = MachineMonitor(0.001, reader=Scripted(1, 2))
    deadline = time.monotonic() + 10
    while "no longer monitored" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.005)
    monitor.stop()
    assert caplog.text.count("this machine is no longer monitored: RuntimeError: the driver went away") == 1
    assert monitor.drain() == {"memory_gib": 2.0, "gpu_0/utilization_percent": 20.0}


def test_other_nodes_are_asked_in_threads_and_one_that_dies_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def fine() -> Mapping[str, float]:
        return {"cpu_percent": 50.0}

    def dead() -> Mapping[str, float]:
        raise ConnectionError("the node left")

    def hangs() -> Mapping[str, float]:
        time.sleep(3600)
        return {}

    system = SystemMonitor(None, {1: fine, 2: dead, 3: hangs}, interval=0.005)
    deadline, seen = time.monotonic() + 10, {}
    while (not seen or "the node left" not in caplog.text) and time.monotonic() < deadline:
        seen |= system.metrics()
        time.sleep(0.005)
    system.stop()
    assert seen == {"system/node_1/cpu_percent": 50.0}
    assert caplog.text.count("node 2 is no longer monitored") == 1


class FakeActor:
    """A monitor in another process, without one."""

    def __init__(self, node: int, names: tuple[str, ...] | Exception) -> None:
        self.node, self.names = node, names

    async def call(self, method: str) -> tuple[str, ...]:
        assert method == "list_gpus"
        if isinstance(self.names, Exception):
            raise self.names
        return self.names

    def start_call(self, method: str) -> Callable[[], Mapping[str, float]]:
        assert method == "drain"
        return lambda: {"cpu_percent": 10.0 * self.node}


def test_a_node_whose_monitor_cannot_start_or_dies_at_once_is_said_and_the_others_keep_their_numbers(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async def spawn(options: ActorOptions, make: Any, *arguments: Any) -> FakeActor:
        assert make is MachineMonitor and options.node is not None and arguments[-1] == (f"{options.node}0", f"{options.node}1")
        if options.node == 1:
            raise RuntimeError("no room on this node")
        return FakeActor(options.node, ConnectionError("it died") if options.node == 2 else ("NVIDIA H100",) * options.node)

    def locate(node: int, devices: Sequence[int]) -> tuple[str, tuple[str, ...]]:
        return "id", tuple(f"{node}{device}" for device in devices)

    cluster: Any = SimpleNamespace(num_nodes=4, devices_per_node=2, on_cpu=False, spawn=spawn, locate=locate)
    keys = [f"logger.log_dir={tmp_path}", "logger.gpu_monitoring.flush_interval=0.005", "policy.model_name=m"]
    config = load_config(None, keys, root=SftRunConfig, check=False).config
    system = asyncio.run(watch_machines(config, cluster))
    deadline, seen = time.monotonic() + 10, {}
    while len(seen) < 2 and time.monotonic() < deadline:
        seen |= system.metrics()
        time.sleep(0.005)
    system.stop()
    assert seen == {"system/node_0/cpu_percent": 0.0, "system/node_3/cpu_percent": 30.0}
    assert system.gpu_names == ("NVIDIA H100",) * 3
    assert "node 1 is not monitored (logger.monitor_gpus): RuntimeError: no room on this node" in caplog.text
    assert "node 2 is not monitored (logger.monitor_gpus): ConnectionError: it died" in caplog.text
