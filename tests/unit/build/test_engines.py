"""Where engines run, by which way weights reach them, and what vLLM is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strop.base_config import validate_section
from strop.build import engines
from strop.generation.generation_config import GenerationConfig
from strop.generation.vllm.vllm_config import SpeculationConfig, VllmConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Recorder:
    """A sender that notes what it is made with."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments, self.options = arguments, options


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Recorder]]:
    kinds = {name: type(name, (Recorder,), {}) for name in ("MemorySender", "CudaIpcSender", "BroadcastSender", "FolderSender")}
    for name, kind in kinds.items():
        monkeypatch.setattr(engines, name, kind)
    return kinds


def sender(config: dict[str, Any], device: torch.device, folder: Path = Path("own")) -> Any:
    return engines.make_sender_factory(validate_section(GenerationConfig, {"backend": "vllm", **config}), device, folder)(3)


@pytest.mark.parametrize(
    ("config", "device", "expected"),
    [
        ({}, CPU, "MemorySender"),
        ({"colocated": {"enabled": False}}, CPU, "MemorySender"),
        ({}, GPU, "CudaIpcSender"),
        ({"vllm_cfg": {"num_engines": 2}}, GPU, "MemorySender"),
        ({"colocated": {"enabled": False}, "vllm_cfg": {"num_engines": 2}}, GPU, "BroadcastSender"),
        ({"weight_sync": {"transport": "folder"}}, GPU, "FolderSender"),
        ({"weight_sync": {"transport": "broadcast"}}, CPU, "BroadcastSender"),
    ],
)
def test_weights_travel_by_the_way_that_reaches_every_engine(
    config: dict[str, Any], device: torch.device, expected: str, made: dict[str, type[Recorder]]
) -> None:
    assert type(sender(config, device)) is made[expected]


@pytest.mark.usefixtures("made")
def test_a_sender_is_made_as_the_configuration_says() -> None:
    sync = {"bucket_mb": 2.0, "timeout_seconds": 5.0}
    assert sender({"weight_sync": sync}, CPU).options == {"timeout": 5.0, "bucket_size": 2 << 20}
    assert "bucket_size" not in sender({}, CPU).options
    assert sender({"weight_sync": {"transport": "broadcast"}}, CPU).options["backend"] == "gloo"
    apart = {"weight_sync": {"transport": "broadcast"}, "colocated": {"enabled": False}}
    assert sender(apart, GPU).options["backend"] == "nccl"
    with pytest.raises(ValueError, match="NCCL does not connect two processes on one GPU"):
        sender({"weight_sync": {"transport": "broadcast"}}, GPU)
    assert sender({"weight_sync": {"transport": "folder", "folder": "there"}}, CPU).arguments == (Path("there"), 3)
    assert sender({"weight_sync": {"transport": "folder"}}, CPU).arguments == (Path("own"), 3)


def test_engines_apart_have_the_gpus_after_the_learner_s_and_colocated_ones_begin_with_it() -> None:
    config = VllmConfig(tensor_parallel_size=2)

    def visible(number: int, *, apart: bool) -> str:
        return engines.make_engine_env(config, number, False, None, separate_devices=apart)["CUDA_VISIBLE_DEVICES"]

    assert [visible(number, apart=True) for number in range(2)] == ["1,2", "3,4"]
    assert [visible(number, apart=False) for number in range(2)] == ["0,1", "2,3"]


def test_an_engine_on_a_cpu_has_its_own_threads_or_as_many_as_the_learner() -> None:
    def threads(config: VllmConfig, learner: int | None) -> str:
        return engines.make_engine_env(config, 0, True, learner, separate_devices=False)["OMP_NUM_THREADS"]

    assert threads(VllmConfig(num_threads=3), 2) == "3"
    assert threads(VllmConfig(), 2) == "2"
    assert threads(VllmConfig(), None) == str(torch.get_num_threads())
    assert threads(VllmConfig(env_vars={"OMP_NUM_THREADS": "7"}), 2) == "7"


def test_speculation_is_said_in_vllm_s_words() -> None:
    assert engines.make_speculative_config(SpeculationConfig()) is None
    assert engines.make_speculative_config(SpeculationConfig(method="ngram", num_speculative_tokens=3)) == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
    assert engines.make_speculative_config(SpeculationConfig(method="draft_model", model_name="small")) == {
        "method": "draft_model",
        "num_speculative_tokens": 4,
        "model": "small",
    }
