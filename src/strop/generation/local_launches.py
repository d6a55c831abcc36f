"""How the engines of vLLM or SGLang on this machine are launched: with which threads or GPUs, and where their output goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from strop.generation.engine_gpus import choose_engine_gpus
from strop.generation.sglang.sglang_launch import SglangLaunch
from strop.generation.vllm.engine_args import VllmLaunch
from strop.gpus import VISIBLE

Launch = TypeVar("Launch", VllmLaunch, SglangLaunch)


def make_local_launches(
    launch: Launch, *, learner: torch.device, threads: int | None, output_folder: Path | None
) -> list[Launch]:
    """Return the launch of each engine of this process. Raises ValueError if there are fewer GPUs than they need.

    Args:
        launch: What all of them have in common.
        learner: Device of the learner, with which colocated engines begin.
        threads: CPU threads of the learner.
        output_folder: For a file of output of each engine; None: they write to that of this process.
    """
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
