"""Creates vLLM and SGLang engines from their launch settings; for engines on this machine also their threads or GPUs, and their
output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from strop.extensions.sglang.require_sglang import require_sglang
from strop.extensions.sglang.sglang_engine import SglangEngine
from strop.extensions.sglang.sglang_launch import SglangLaunch, make_server_arguments
from strop.generation.engine_gpus import choose_engine_gpus
from strop.generation.vllm.engine_args import VllmLaunch
from strop.generation.vllm.vllm_engine import VllmEngine
from strop.gpus import VISIBLE
from strop.models.vision.vision_processor import VisionProcessor

Launch = TypeVar("Launch", bound=VllmLaunch | SglangLaunch)


def make_launched_engine(
    name: str,
    launch: VllmLaunch | SglangLaunch,
    tokenizer: Any,
    *,
    stop_ids: Sequence[int],
    vision: VisionProcessor | None = None,
) -> VllmEngine | SglangEngine:
    """Create the engine of a launch, without starting it. ``vision``: the image processor of a model that reads images."""
    if isinstance(launch, SglangLaunch):
        return SglangEngine(name, launch, tokenizer, stop_ids=stop_ids, vision=vision)
    return VllmEngine(name, launch, tokenizer, stop_ids=stop_ids, vision=vision)


def make_local_engines(
    launch: VllmLaunch | SglangLaunch,
    tokenizer: Any,
    *,
    learner: torch.device,
    stop_ids: Sequence[int],
    threads: int | None,
    output_folder: Path | None = None,
    vision: VisionProcessor | None = None,
) -> list[VllmEngine | SglangEngine]:
    """Create the configured number of engines on this machine, without starting them.

    Raises ValueError if vLLM or SGLang is not installed, GPUs are missing, or SGLang's arguments cannot work here.

    Args:
        launch: Settings common to all of them.
        tokenizer: Of the model.
        learner: Device of the learner, with which colocated engines begin.
        stop_ids: Token ids that end every request.
        threads: CPU threads of the learner.
        output_folder: For a file of output of each engine; None: they write to that of this process.
        vision: Of a model that reads images.
    """
    _require_library(launch)
    launches = _launch_each(launch, learner=learner, threads=threads, output_folder=output_folder)
    return [
        make_launched_engine(f"engine {number}", each, tokenizer, stop_ids=stop_ids, vision=vision)
        for number, each in enumerate(launches)
    ]


def _require_library(launch: VllmLaunch | SglangLaunch) -> None:
    if isinstance(launch, SglangLaunch):
        require_sglang(launch.python)
        make_server_arguments(launch, port=0, key="")  # refuses invalid arguments before anything starts
    elif find_spec("vllm") is None:
        raise ValueError(
            "policy.generation.backend is vllm, and vLLM cannot be imported here (No module named 'vllm'): install it "
            "(`make setup-vllm` in Strop's checkout takes the build for this machine), or set policy.generation.backend=torch"
        )


def _launch_each(launch: Launch, *, learner: torch.device, threads: int | None, output_folder: Path | None) -> list[Launch]:
    """Return the launch of each engine of this process. Raises ValueError if there are too few GPUs."""
    options = launch.config.engine_options
    if launch.on_cpu:
        own = {"OMP_NUM_THREADS": str(options.num_threads or threads or torch.get_num_threads())}
        environments = [own] * options.num_local_engines
    else:
        environments = [{VISIBLE: ",".join(gpus)} for gpus in choose_engine_gpus(launch.config, learner.index or 0)]
    return [
        replace(
            launch,
            environment=environment,
            output_file=None if output_folder is None else output_folder / f"engine_{number}.log",
        )
        for number, environment in enumerate(environments)
    ]
