"""Real SGLang engines for tests: their interpreter, a tiny model, and a class of weights that can be told to go wrong."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.extensions.sglang.server_process import SglangLaunch
from strop.extensions.sglang.sglang_config import PYTHON_VARIABLE, SglangConfig
from strop.extensions.sglang.sglang_engine import SglangEngine
from strop.generation.engine_launch import LaunchedAdapters
from strop.generation.generation_config import GenerationConfig

TESTS = Path(__file__).parents[1]  # on the engines' path, for the faulty weights
LIMIT = 850.0  # seconds, before the tests' own of 900: a server that cannot start ends, and nothing waits for it any longer


def needs_sglang() -> None:
    """Skips the module or test that asks where no interpreter with SGLang is named."""
    if not os.environ.get(PYTHON_VARIABLE):
        pytest.skip("no interpreter with SGLang is named: make test-sglang", allow_module_level=True)


def make_sglang_launch(
    folder: Path, *, faulty: bool = False, output: str = "engine.log", adapters: LaunchedAdapters | None = None, **keys: Any
) -> SglangLaunch:
    """Return what an engine is launched with. ``keys``: of the configuration's section ``sglang_cfg``."""
    small: dict[str, Any] = {
        "dtype": "float32",
        "context_length": 256,
        "max_total_tokens": 8192,
        "max_running_requests": 16,
        "startup_seconds": LIMIT,
    }
    attached: dict[str, Any] = {"sglang_cfg": SglangConfig(**{**small, **keys})}
    launch = SglangLaunch(
        config=GenerationConfig(backend="sglang", **attached),
        model=str(folder),
        on_cpu=True,
        adapters=adapters,
        environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)},
        output_file=folder / output,
    )
    return replace(launch, model_weights="support.faulty_model_weights:FaultyModelWeights") if faulty else launch


def make_sglang_engine(
    folder: Path, tokenizer: Any, *, number: int = 0, faulty: bool = False, adapters: LaunchedAdapters | None = None, **keys: Any
) -> SglangEngine:
    launch = make_sglang_launch(folder, faulty=faulty, output=f"engine_{number}.log", adapters=adapters, **keys)
    return SglangEngine(f"engine {number}", launch, tokenizer, stop_ids=(tokenizer.eos_token_id,))
