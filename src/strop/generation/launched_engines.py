"""Engines in separate processes: which one a configuration names, and those of this machine with their threads or GPUs and output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from strop import plugins
from strop.generation.engine_gpus import choose_engine_gpus
from strop.generation.engine_launch import EngineLaunch, LaunchedEngine
from strop.generation.generation_config import GenerationConfig
from strop.gpus import VISIBLE
from strop.models.vision.vision_processor import VisionProcessor
from strop.openmp import openmp_variables


def find_engine(config: GenerationConfig) -> type[LaunchedEngine]:
    """Return the engine that a configuration names. Raises UserCodeError for an extension that cannot be imported."""
    if config.uses_vllm:
        from strop.generation.vllm.vllm_engine import VllmEngine

        return VllmEngine
    found: type[LaunchedEngine] = plugins.load("engines", str(config.launched))
    return found


def make_launched_engine(
    name: str, launch: EngineLaunch, tokenizer: Any, *, stop_ids: Sequence[int], vision: VisionProcessor | None = None
) -> LaunchedEngine:
    """Create the engine of a launch, without starting it. ``vision``: the image processor of a model that reads images."""
    return find_engine(launch.config)(name, launch, tokenizer, stop_ids=stop_ids, vision=vision)


def make_local_engines(
    launch: EngineLaunch,
    tokenizer: Any,
    *,
    learner: torch.device,
    stop_ids: Sequence[int],
    threads: int | None,
    output_folder: Path | None = None,
    vision: VisionProcessor | None = None,
) -> list[LaunchedEngine]:
    """Create the configured number of engines on this machine, without starting them.

    Raises ValueError if their library is not installed, GPUs are missing, or the launch cannot work here.

    Args:
        launch: Settings common to all of them.
        tokenizer: Of the model.
        learner: Device of the learner, with which colocated engines begin.
        stop_ids: Token ids that end every request.
        threads: CPU threads of the learner.
        output_folder: For a file of output of each engine; None: they write to that of this process.
        vision: Of a model that reads images.
    """
    launch.config.engine_options.require_library()
    launch.check()
    launches = _launch_each(launch, learner=learner, threads=threads, output_folder=output_folder)
    return [
        make_launched_engine(f"engine {number}", each, tokenizer, stop_ids=stop_ids, vision=vision)
        for number, each in enumerate(launches)
    ]


def _launch_each(
    launch: EngineLaunch, *, learner: torch.device, threads: int | None, output_folder: Path | None
) -> list[EngineLaunch]:
    """Return the launch of each engine of this process. Raises ValueError if there are too few GPUs."""
    options = launch.config.engine_options
    if launch.on_cpu:
        own = {"OMP_NUM_THREADS": str(options.num_threads or threads or torch.get_num_threads()), **openmp_variables()}
        environments = [own] * options.num_local_engines
    else:
        environments = [{VISIBLE: ",".join(gpus)} for gpus in choose_engine_gpus(launch.config, learner.index or 0)]
    return [
        replace(
            launch, environment=environment, output_file=None if output_folder is None else output_folder / f"engine_{number}.log"
        )
        for number, environment in enumerate(environments)
    ]
