"""SGLang engines on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from strop.generation.local_launches import make_local_launches
from strop.generation.sglang.sglang_engine import SglangEngine
from strop.generation.sglang.sglang_launch import SglangLaunch
from strop.models.vision.vision_processor import VisionProcessor
from strop.packages import is_installed


def make_local_sglang_engines(
    launch: SglangLaunch,
    tokenizer: Any,
    *,
    learner: torch.device,
    stop_ids: Sequence[int],
    threads: int | None,
    output_folder: Path | None = None,
    vision: VisionProcessor | None = None,
) -> list[SglangEngine]:
    """Make the configured number of engines, without starting them. Raises ValueError if SGLang is not installed, or GPUs are missing.

    Args:
        launch: What all of them have in common.
        tokenizer: Of the model.
        learner: Device of the learner, with which colocated engines begin.
        stop_ids: Token ids that end every request.
        threads: CPU threads of the learner.
        output_folder: For a file of output of each engine; None: they write to that of this process.
        vision: Of a model that reads images.
    """
    require_sglang(launch.python)
    launches = make_local_launches(launch, learner=learner, threads=threads, output_folder=output_folder)
    return [
        SglangEngine(f"engine {number}", each, tokenizer, stop_ids=stop_ids, vision=vision)
        for number, each in enumerate(launches)
    ]


def require_sglang(python: str) -> None:
    """Raises ValueError unless an interpreter has SGLang."""
    if python == sys.executable:
        found, why = is_installed("sglang"), "No module named 'sglang'"
    else:
        look = "import importlib.util as u, sys; sys.exit(u.find_spec('sglang') is None)"
        try:
            found, why = subprocess.run([python, "-c", look], capture_output=True).returncode == 0, "No module named 'sglang'"
        except OSError as error:
            found, why = False, str(error)
    if not found:
        raise ValueError(
            f"policy.generation.backend is sglang, and {python} has no SGLang ({why}): `make setup-sglang` makes one that has it; "
            "set policy.generation.sglang_cfg.python, or STROP_SGLANG_PYTHON, to its interpreter, or "
            "policy.generation.backend=torch"
        )
