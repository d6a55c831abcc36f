"""Which engine and which GPUs a run takes on a machine that has some. None of this has been run yet."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from strop import gpus
from strop.config import GrpoRunConfig, load_config
from strop.generation.engine_gpus import choose_engine_gpus
from strop.runs.local_device import resolve_device_name
from support.needs import needs_vllm

pytestmark = pytest.mark.gpu

RUN = ["policy.model_name=m", "env.arithmetic={}", "data.train.env_name=arithmetic"]


def test_auto_is_vllm_here() -> None:
    needs_vllm()
    generation = load_config(None, RUN, root=GrpoRunConfig).config.policy.generation
    assert generation.uses_vllm and generation.auto_engine is not None and generation.auto_engine.reason


def test_the_gpus_that_are_seen_are_those_of_torch() -> None:
    assert len(gpus.visible_gpus()) == torch.cuda.device_count() >= 1
    with pytest.raises(ValueError, match="this process sees"):
        resolve_device_name(f"cuda:{torch.cuda.device_count()}")


def test_the_gpu_of_an_engine_is_the_learners_in_another_process_too() -> None:
    """By UUID: the name that is given to the engine's process stands for the GPU that the learner computes on."""
    generation = load_config(None, [*RUN, "policy.generation.backend=vllm"], root=GrpoRunConfig).config.policy.generation
    last = torch.cuda.device_count() - 1
    ((name,),) = choose_engine_gpus(generation, last)
    code = "import torch; print(torch.cuda.get_device_properties(0).uuid, torch.cuda.device_count())"
    said = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, gpus.VISIBLE: name}, capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == [str(torch.cuda.get_device_properties(last).uuid), "1"]
