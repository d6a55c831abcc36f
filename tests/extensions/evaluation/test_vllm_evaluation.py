"""``strop eval`` with the real vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loop.runs import overrides, start
from loop.tiny import build_tiny
from support.forks import with_vllm
from support.needs import needs_vllm

needs_vllm()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.exhaustive
def test_an_evaluation_with_vllm_says_what_one_with_the_embedded_engine_says(tmp_path: Path) -> None:
    served = build_tiny(tmp_path / "tiny", head_dim=32)
    said = {}
    for backend in ("torch", "vllm"):
        settings = {
            "generation.model_name": str(served),
            "generation.backend": backend,
            "generation.precision": "float32",
            "generation.num_threads": 1,
            "generation.temperature": 0,
            "generation.max_new_tokens": 4,
            "generation.vllm_cfg.max_model_len": 64,
            "generation.vllm_cfg.kv_cache_memory_gb": 0.125,
            "data.env_name": "arithmetic",
            "data.size": 12,
            "data.max_input_seq_length": 60,
            "env.arithmetic.max_operand": 3,
            "env.arithmetic.wording": "{expression}=",
            "eval.save_path": backend,
        }
        with with_vllm():
            outcome = start(["eval", "--json", *overrides(settings)], tmp_path / backend).finish(200)
        assert outcome.code == 0, outcome.out + outcome.err
        metrics = json.loads(outcome.out)["metrics"]
        said[backend] = {name: round(value, 4) for name, value in metrics.items() if "seconds" not in name}
    assert said["torch"] == said["vllm"] and said["torch"]
