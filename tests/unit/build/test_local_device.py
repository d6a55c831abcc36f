"""The device of a configuration is one that this process sees."""

from __future__ import annotations

import pytest
import torch

from strop import gpus
from strop.build.local_device import resolve_device_name
from strop.build.models import select_device


@pytest.fixture(autouse=True)
def two_of_eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.VISIBLE, "2,3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_a_gpu_is_counted_among_those_that_are_seen() -> None:
    assert [resolve_device_name(name) for name in ("auto", "cpu", "cuda", "cuda:1")] == ["cuda", "cpu", "cuda", "cuda:1"]
    with pytest.raises(ValueError, match=r"cuda:2, and this process sees 2 GPUs \(CUDA_VISIBLE_DEVICES=2,3\).*cuda:0 to cuda:1"):
        resolve_device_name("cuda:2")
    assert gpus.visible_gpus() == ["2", "3"]


def test_names_after_one_that_cuda_does_not_know_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.VISIBLE, "GPU-1,GPU-unknown,GPU-2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert gpus.visible_gpus() == ["GPU-1"]


def test_without_a_gpu_none_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpus.visible_gpus() == [] and resolve_device_name("auto") == "cpu"
    with pytest.raises(ValueError, match="torch finds no GPU here"):
        resolve_device_name("cuda:0")


def test_the_policys_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("auto", "cuda", "cpu", "cuda:1"):
        select_device(name)
    assert chosen == [torch.device("cuda", 1)]
