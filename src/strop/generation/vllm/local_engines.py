"""vLLM engines on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from strop.generation.local_launches import make_local_launches
from strop.generation.vllm.engine_args import VllmLaunch
from strop.generation.vllm.vllm_engine import VllmEngine
from strop.models.vision.vision_processor import VisionProcessor


def make_local_engines(
    launch: VllmLaunch,
    tokenizer: Any,
    *,
    learner: torch.device,
    stop_ids: Sequence[int],
    threads: int | None,
    output_folder: Path | None = None,
    vision: VisionProcessor | None = None,
) -> list[VllmEngine]:
    """Make the configured number of engines, without starting them. Raises ValueError if vLLM is not installed, or GPUs are missing.

    Args:
        launch: What all of them have in common.
        tokenizer: Of the model.
        learner: Device of the learner, with which colocated engines begin.
        stop_ids: Token ids that end every request.
        threads: CPU threads of the learner.
        output_folder: For a file of output of each engine; None: they write to that of this process.
        vision: Of a model that reads images.
    """
    if find_spec("vllm") is None:
        raise ValueError(
            "policy.generation.backend is vllm, and vLLM cannot be imported here (No module named 'vllm'): install it (`pip install vllm`, "
            "or `make setup-vllm` on a machine without a GPU), or set policy.generation.backend=torch"
        )
    launches = make_local_launches(launch, learner=learner, threads=threads, output_folder=output_folder)
    return [
        VllmEngine(f"engine {number}", each, tokenizer, stop_ids=stop_ids, vision=vision) for number, each in enumerate(launches)
    ]
