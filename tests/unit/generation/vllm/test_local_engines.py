"""Where the engines of one machine run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strop import packages
from strop.generation.generation_config import ColocatedConfig, GenerationConfig
from strop.generation.launched_engines import make_local_engines
from strop.generation.vllm.engine_args import VllmLaunch
from strop.generation.vllm.vllm_config import VllmConfig
from strop.gpus import VISIBLE


def environments(
    threads: int | None = None, *, apart: bool = False, on_cpu: bool = False, learner: int = 0, **keys: Any
) -> list[dict[str, str]]:
    config = GenerationConfig(backend="vllm", vllm_cfg=VllmConfig(**keys), colocated=ColocatedConfig(enabled=not apart))
    launch = VllmLaunch(config=config, model="folder", on_cpu=on_cpu)
    engines = make_local_engines(launch, None, learner=torch.device("cuda", learner), stop_ids=(), threads=threads)
    return [engine.launch.env_vars for engine in engines]


@pytest.fixture(autouse=True)
def five_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.delenv(VISIBLE, raising=False)


def test_engines_apart_have_the_gpus_after_the_learner_s_and_colocated_ones_begin_with_it() -> None:
    def visible(*, apart: bool) -> list[str]:
        return [each["CUDA_VISIBLE_DEVICES"] for each in environments(apart=apart, num_engines=2, tensor_parallel_size=2)]

    assert visible(apart=True) == ["1,2", "3,4"]
    assert visible(apart=False) == ["0,1", "2,3"]


def test_a_learner_on_another_gpu_has_its_colocated_engine_there_and_the_others_elsewhere() -> None:
    def visible(*, apart: bool, learner: int) -> list[str]:
        return [each[VISIBLE] for each in environments(apart=apart, learner=learner, num_engines=2, tensor_parallel_size=2)]

    assert visible(apart=True, learner=1) == ["0,2", "3,4"]
    assert visible(apart=False, learner=3) == ["3,0", "1,2"]


@pytest.mark.parametrize("inherited", ["2,3,7", "GPU-8932f937,GPU-1b2c,GPU-77aa", "2, 3, 7"])
def test_inherited_visible_devices_are_those_that_engines_are_divided_over(
    inherited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, inherited)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    first, second, third = (name.strip() for name in inherited.split(","))
    assert [each[VISIBLE] for each in environments(apart=True, num_engines=2)] == [second, third]
    assert [each[VISIBLE] for each in environments(apart=True, learner=1, num_engines=2)] == [first, third]
    assert [each[VISIBLE] for each in environments(learner=2)] == [third]


def test_engines_that_need_more_gpus_than_are_seen_are_refused_with_what_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4,5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        ValueError, match=r"2 vLLM engines of 1 GPU .*need 2 GPUs alongside the learner's.*2 GPUs \(CUDA_VISIBLE_DEVICES=4,5\)"
    ):
        environments(apart=True, num_engines=2)
    with pytest.raises(ValueError, match=r"1 vLLM engine of 4 GPUs .*need 4 GPUs, and"):
        environments(tensor_parallel_size=4)


def test_an_engine_on_a_cpu_has_its_own_threads_or_as_many_as_the_learner() -> None:
    def threads(learner: int | None, **keys: Any) -> str:
        return environments(learner, on_cpu=True, **keys)[0]["OMP_NUM_THREADS"]

    assert threads(2, num_threads=3) == "3"
    assert threads(2) == "2"
    assert threads(None) == str(torch.get_num_threads())
    assert threads(2, env_vars={"OMP_NUM_THREADS": "7"}) == "7"


def test_engines_on_gpus_are_not_forks_of_a_process_that_has_used_cuda() -> None:
    method = "VLLM_WORKER_MULTIPROC_METHOD"
    assert environments()[0][method] == "spawn" and method not in environments(on_cpu=True)[0]
    assert environments(env_vars={method: "forkserver"})[0][method] == "forkserver"


def test_each_engine_writes_to_a_file_of_its_own() -> None:
    launch = VllmLaunch(config=GenerationConfig(backend="vllm", vllm_cfg=VllmConfig(num_engines=2)), model="folder", on_cpu=True)
    engines = make_local_engines(launch, None, learner=torch.device("cpu"), stop_ids=(), threads=1, output_folder=Path("logs"))
    assert [engine.launch.output_file for engine in engines] == [Path("logs/engine_0.log"), Path("logs/engine_1.log")]


def test_without_vllm_engines_are_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_here", lambda name: False)
    with pytest.raises(ValueError, match=r"vLLM cannot be imported here .*make setup-vllm.*policy\.generation\.backend=torch"):
        environments()
