"""The peak that ``perf/mfu`` is a share of: whose it is, and of how many devices."""

from __future__ import annotations

from typing import Any

import pytest

from strop.config import ConfigError, load_config
from strop.config.schema.run_config import SftRunConfig
from strop.runs.monitors import run_throughput
from strop.runs.monitors.measured_peak import MeasuredPeak

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
