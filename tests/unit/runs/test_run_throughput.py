"""The peak that ``perf/mfu`` is a share of: whose it is, and of how many devices."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.config import ConfigError, load_config
from strop.config.schema.run_config import SftRunConfig
from strop.runs.monitors import run_throughput
from strop.runs.monitors.run_throughput import MeasuredPeak

KEYS = ["policy.model_name=m", "policy.precision=float32"]


def load(*keys: str) -> Any:
    return load_config(None, [*KEYS, *keys], root=SftRunConfig, check=False).config


def find(*keys: str, gpu: str = "", on_cpu: bool = True) -> run_throughput.DevicePeak | None:
    config = load(*keys)
    counts = run_throughput.count_devices(config)
    return run_throughput.find_peak(config, [gpu] if gpu else [], counts, on_cpu=on_cpu)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Threads that were measured, on a machine of four cores that does 1 GFLOP/s with each thread."""
    asked: list[int | None] = []

    def measure(threads: int | None = None) -> MeasuredPeak:
        asked.append(threads)
        rate = 1e9 * (threads or 4)
        return MeasuredPeak(device="p", flops={"float32": rate, "bfloat16": 2 * rate}, source="measured")

    monkeypatch.setattr(run_throughput, "measure_peak", measure)
    monkeypatch.setattr(run_throughput.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    return asked


def test_processors_are_measured_only_where_that_is_asked_for(measured: list[int | None]) -> None:
    assert find() is None and not measured
    assert find("logger.peak_tflops=measure") == run_throughput.DevicePeak(4e9, "p, measured")
    assert find("logger.peak_tflops=measure", "policy.num_threads=2") == run_throughput.DevicePeak(2e9, "p, measured")
    assert find("logger.peak_tflops=measure", "policy.precision=bfloat16", "policy.num_threads=1").flops == 2e9  # type: ignore[union-attr]


def test_the_ranks_of_a_machine_have_no_more_than_the_machine(measured: list[int | None]) -> None:
    ray = ("logger.peak_tflops=measure", "cluster.backend=ray")
    assert find(*ray, "cluster.gpus_per_node=2").flops == 2e9  # type: ignore[union-attr]
    assert find(*ray, "cluster.gpus_per_node=2", "policy.num_threads=4").flops == 2e9  # type: ignore[union-attr]
    many = find(*ray, "cluster.gpus_per_node=8")
    assert many is not None and many.flops == 0.5e9 and "shared by 8 ranks" in many.source
    nodes = find(*ray, "cluster.gpus_per_node=2", "cluster.num_nodes=3")
    assert nodes is not None and nodes.flops == 2e9  # of each device: the rate is divided by six devices


def test_a_gpu_has_the_peak_of_the_table_and_a_user_may_give_one() -> None:
    h100 = find("policy.precision=bfloat16", gpu="NVIDIA H100 80GB HBM3", on_cpu=False)
    assert h100 is not None and h100.flops == 989e12 and h100.source == "H100, from the table of devices"
    assert find(gpu="NVIDIA H100 80GB HBM3") is None  # a run on this machine's processors
    assert find(gpu="Unknown", on_cpu=False) is None
    assert find("logger.peak_tflops=500", gpu="Unknown", on_cpu=False) == run_throughput.DevicePeak(5e14, "logger.peak_tflops")
    assert find("logger.peak_tflops=1") == run_throughput.DevicePeak(1e12, "logger.peak_tflops")


@pytest.mark.parametrize("value", ["0", "-1", "fast"])
def test_a_peak_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="peak_tflops"):
        load(f"logger.peak_tflops={value}")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(run_throughput, "SECONDS", 0.004)
    monkeypatch.setattr(run_throughput, "SIDES", (64, 128))
    monkeypatch.setattr(run_throughput, "AGREE", 2.0)


def test_a_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    found = run_throughput.measure_peak(1)
    assert torch.get_num_threads() == before
    assert found.peak("float32") > 1e8 and found.peak("fp8") == max(found.flops.values())
    assert ", 1 thread" in found.device and found.source.startswith("measured on this machine on 20")
    file = next(tmp_path.rglob("peak-*.json"))
    monkeypatch.setattr(run_throughput, "_measure_peak", lambda *_: pytest.fail("it is known"))
    assert run_throughput.measure_peak(1) == found
    monkeypatch.setattr(run_throughput, "_measure_peak", lambda *_: (found, True))
    for damaged in ("{", "[]", json.dumps({**asdict(found), "flops": {"float32": -1, "bfloat16": 1}})):
        file.write_text(damaged)
        assert run_throughput.measure_peak(1) == found and json.loads(file.read_text()) == asdict(found)


def test_other_threads_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    peak = MeasuredPeak(device="p", flops={"float32": 1e9, "bfloat16": 2e9}, source="measured")
    monkeypatch.setattr(run_throughput, "_measure_peak", lambda name, threads: (asked.append(name), (peak, True))[1])
    for threads in (1, 2, 1):
        run_throughput.measure_peak(threads)
    assert len(asked) == 2
