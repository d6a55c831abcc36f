"""The table of devices."""

from __future__ import annotations

import pytest

from strop.extensions.performance.devices import device_named, find_device


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
    ],
)
def test_a_device_is_found_by_what_the_driver_calls_it(reported: str, name: str) -> None:
    device = find_device(reported)
    assert device is not None
    assert device.name == name


def test_a_user_names_a_device_as_he_likes() -> None:
    assert device_named("h100").name == "H100"
    assert device_named("rtx 4090").name == "RTX-4090"
    with pytest.raises(ValueError, match=r"no device 'h1000' in the table: it has A100-40GB, A100"):
        device_named("h1000")


def test_a_rate_that_a_device_lacks_is_refused() -> None:
    assert device_named("H100").peak_flops("bfloat16") == 989e12
    with pytest.raises(ValueError, match="A100 has no rate for 'fp8': it has bfloat16, float16, float32"):
        device_named("A100").peak_flops("fp8")
