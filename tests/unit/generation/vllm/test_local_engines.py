"""Where the engines of one machine run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strop.generation.generation_config import ColocatedConfig, GenerationConfig
from strop.generation.vllm import local_engines
from strop.generation.vllm.engine_args import VllmLaunch
from strop.generation.vllm.local_engines import make_local_engines
from strop.generation.vllm.vllm_config import VllmConfig


def environments(threads: int | None = None, *, apart: bool = False, on_cpu: bool = False, **keys: Any) -> list[dict[str, str]]:
    config = GenerationConfig(vllm_cfg=VllmConfig(**keys), colocated=ColocatedConfig(enabled=not apart))
    launch = VllmLaunch(config=config, model="folder", on_cpu=on_cpu)
    return [engine.launch.env_vars for engine in make_local_engines(launch, None, stop_ids=(), threads=threads)]


def test_engines_apart_have_the_gpus_after_the_learner_s_and_colocated_ones_begin_with_it() -> None:
    def visible(*, apart: bool) -> list[str]:
        return [each["CUDA_VISIBLE_DEVICES"] for each in environments(apart=apart, num_engines=2, tensor_parallel_size=2)]

    assert visible(apart=True) == ["1,2", "3,4"]
    assert visible(apart=False) == ["0,1", "2,3"]


def test_an_engine_on_a_cpu_has_its_own_threads_or_as_many_as_the_learner() -> None:
    def threads(learner: int | None, **keys: Any) -> str:
        return environments(learner, on_cpu=True, **keys)[0]["OMP_NUM_THREADS"]

    assert threads(2, num_threads=3) == "3"
    assert threads(2) == "2"
    assert threads(None) == str(torch.get_num_threads())
    assert threads(2, env_vars={"OMP_NUM_THREADS": "7"}) == "7"


def test_each_engine_writes_to_a_file_of_its_own() -> None:
    launch = VllmLaunch(config=GenerationConfig(vllm_cfg=VllmConfig(num_engines=2)), model="folder", on_cpu=True)
    engines = make_local_engines(launch, None, stop_ids=(), threads=1, output_folder=Path("logs"))
    assert [engine.launch.output_file for engine in engines] == [Path("logs/engine_0.log"), Path("logs/engine_1.log")]


def test_without_vllm_engines_are_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_engines, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"vLLM cannot be imported here .*pip install vllm.*policy\.generation\.backend=torch"):
        environments()
