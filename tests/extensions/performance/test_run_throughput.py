"""The peak that ``perf/mfu`` is a share of: whose it is, and of how many devices."""

from __future__ import annotations

from typing import Any

import pytest

from strop.config import ConfigError, load_config
from strop.extensions.performance.performance import DevicePeak, find_peak
from strop.extensions.recorded.recorded_config import SftRunConfig

KEYS = ["policy.model_name=m", "policy.precision=float32"]


def load(*keys: str) -> Any:
    return load_config(None, [*KEYS, *keys], root=SftRunConfig, check=False).config


def find(*keys: str, gpu: str = "", on_cpu: bool = True) -> DevicePeak | None:
    return find_peak(load(*keys), [gpu] if gpu else [], on_cpu=on_cpu)


def test_a_gpu_has_the_peak_of_the_table_and_a_user_may_give_one() -> None:
    h100 = find("policy.precision=bfloat16", gpu="NVIDIA H100 80GB HBM3", on_cpu=False)
    assert h100 is not None and h100.flops == 989e12 and h100.source == "H100, from the table of devices"
    assert find(gpu="NVIDIA H100 80GB HBM3") is None  # a run on this machine's processors
    assert find(gpu="Unknown", on_cpu=False) is None
    assert find("logger.peak_tflops=500", gpu="Unknown", on_cpu=False) == DevicePeak(5e14, "logger.peak_tflops")
    assert find("logger.peak_tflops=1") == DevicePeak(1e12, "logger.peak_tflops")


@pytest.mark.parametrize("value", ["0", "-1", "fast"])
def test_a_peak_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="peak_tflops"):
        load(f"logger.peak_tflops={value}")
