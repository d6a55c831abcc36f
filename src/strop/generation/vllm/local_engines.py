"""vLLM engines on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from strop.generation.pool import EnginePool
from strop.generation.vllm.engine_args import VllmLaunch
from strop.generation.vllm.vllm_config import VllmConfig
from strop.generation.vllm.vllm_engine import VllmEngine
from strop.weight_sync.base import UpdatableEngine


def make_local_engines(
    launch: VllmLaunch, tokenizer: Any, *, stop_ids: Sequence[int], threads: int | None, output_folder: Path | None = None
) -> list[VllmEngine]:
    """Make the configured number of engines, without starting them. Raises ValueError if vLLM is not installed.

    Args:
        launch: What all of them have in common.
        tokenizer: Of the model.
        stop_ids: Token ids that end every request.
        threads: CPU threads of the learner.
        output_folder: For a file of output of each engine; None: they write to that of this process.
    """
    if find_spec("vllm") is None:
        raise ValueError(
            "policy.generation.backend is vllm, and vLLM cannot be imported here (No module named 'vllm'): install it (`pip install vllm`, "
            "or `make setup-vllm` on a machine without a GPU), or set policy.generation.backend=torch"
        )
    separate = not launch.config.colocated.enabled
    launches = [
        replace(
            launch,
            environment=make_engine_env(launch.config.vllm_cfg, number, launch.on_cpu, threads, separate_devices=separate),
            output_file=None if output_folder is None else output_folder / f"engine_{number}.log",
        )
        for number in range(launch.config.vllm_cfg.num_local_engines)
    ]
    return [VllmEngine(f"engine {number}", each, tokenizer, stop_ids=stop_ids) for number, each in enumerate(launches)]


def make_engine_env(
    config: VllmConfig, number: int, on_cpu: bool, threads: int | None, *, separate_devices: bool
) -> dict[str, str]:
    """Return the environment variables that place engine ``number``: its CPU threads, or its GPUs. ``separate_devices``: GPU 0 is the
    learner's."""
    if on_cpu:
        return {"OMP_NUM_THREADS": str(config.num_threads or threads or torch.get_num_threads())}
    size = config.tensor_parallel_size * config.pipeline_parallel_size
    first = (1 if separate_devices else 0) + number * size
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(first + offset) for offset in range(size))}


async def start_serving_pool(engines: Sequence[VllmEngine], on_close: Callable[[], object]) -> EnginePool:
    """Start engines with the weights of their model folder, and put them behind one generator. ``on_close`` is called when it is closed."""
    pool = EnginePool(engines, max_restarts=engines[0].config.max_restarts, on_close=[on_close])

    async def restart(engine: UpdatableEngine) -> None:
        assert isinstance(engine, VllmEngine)
        await engine.start()
        await engine.use_own_weights(0)

    pool.restart_engine = restart
    for engine in engines:
        await restart(engine)
    pool.set_version(0)
    return pool
