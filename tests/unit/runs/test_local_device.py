"""The device of a configuration is one that this process sees."""

from __future__ import annotations

import logging

import pytest
import torch

from strop import gpus
from strop.config import GrpoRunConfig, load_config
from strop.runs.local_device import resolve_device_name
from strop.runs.models import select_device, set_up_gpu
from support.overrides import RUN


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


@pytest.mark.parametrize(
    ("overrides", "environment", "expands", "said"),
    [
        (["policy.generation.backend=torch"], {}, True, "segments that expand"),
        (["policy.generation.backend=vllm"], {}, False, "fixed segments, as weights may be sent by CUDA IPC"),
        (["policy.generation.backend=vllm", "policy.generation.weight_sync.transport=memory"], {}, True, "segments that expand"),
        (["policy.generation.backend=vllm", "policy.generation.colocated.enabled=false"], {}, True, "segments that expand"),
        ([], {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False, "set by an environment variable"),
        (["policy.device=cpu"], {}, False, None),
    ],
)
def test_the_learners_memory_expands_unless_other_processes_may_map_it(
    overrides: list[str],
    environment: dict[str, str],
    expands: bool,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = load_config(None, [*RUN, "policy.device=cuda:1", *overrides], root=GrpoRunConfig, check=False).config
    with caplog.at_level(logging.INFO):
        set_up_gpu(config)
    assert settings == (["expandable_segments:True"] if expands else [])
    assert not caplog.records if said is None else said in caplog.text
