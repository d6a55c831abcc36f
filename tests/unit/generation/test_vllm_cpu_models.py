"""What vLLM's CPU build cannot run, found in a model's config.json, with what to set instead."""

from __future__ import annotations

import re
from typing import Any

import pytest

from strop.generation.vllm import supported_models
from strop.generation.vllm.supported_models import find_cpu_problems
from strop.generation.vllm.vllm_config import VllmConfig

DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
NO_PREFIXES = {"enable_prefix_caching": False}


def find(values: dict[str, Any], **keys: Any) -> list[str]:
    return [str(each) for each in find_cpu_problems(values, VllmConfig(**keys), "policy.generation")]


@pytest.mark.parametrize(
    ("values", "keys", "found"),
    [
        ({"model_type": "deepseek_v32", "index_topk": 16}, {}, "run deepseek_v32: it has no sparse attention"),
        ({"model_type": "glm_moe_dsa", "index_topk": 16}, {}, "run glm_moe_dsa: it has no sparse attention"),
        ({"model_type": "bamba"}, {}, "run bamba: vLLM has no model of it since 0.23"),
        ({"model_type": "kimi_linear"}, {}, "run kimi_linear: its kernels need a GPU"),
        ({"model_type": "olmo_hybrid"}, {}, "run olmo_hybrid: its kernels need a GPU"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*E"}, NO_PREFIXES, "it has no experts without gates"),
        ({"model_type": "nemotron_h", "layers_block_type": ["mamba", "moe"]}, NO_PREFIXES, "it has no experts without gates"),
        ({"model_type": "qwen3_next", **DELTA, "linear_value_head_dim": 64}, {}, "not both 64 or both 128"),
        ({"model_type": "qwen3_next", **DELTA}, {"precision": "float32"}, "precision: found float32, .*Set it to bfloat16"),
        ({"model_type": "falcon_h1"}, {}, "enable_prefix_caching: found true, .*falcon_h1's Mamba layers .*Set it to false"),
    ],
)
def test_what_the_cpu_build_cannot_run_is_named_with_what_to_set(
    values: dict[str, Any], keys: dict[str, Any], found: str
) -> None:
    (problem,) = find(values, **keys)
    assert re.search(found, problem.replace("\n", " "))
    assert "Set it to" in problem


def test_a_model_within_a_vision_model_is_found_and_needs_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", **DELTA}}
    monkeypatch.setattr(supported_models, "is_installed", lambda package: False)
    assert "pip install --no-deps torchvision" in find(values)[0]
    monkeypatch.setattr(supported_models, "is_installed", lambda package: True)
    assert not find(values)
    assert "gated delta rule of qwen3_5_text in bfloat16 only" in find(values, precision="float32")[0]


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({"model_type": "llama"}, {}),
        ({"model_type": "lfm2"}, {"precision": "float32"}),
        ({"model_type": "qwen3_next", **DELTA}, {}),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*-M"}, NO_PREFIXES),
        ({}, {}),
    ],
)
def test_what_it_can_run_is_not_refused(values: dict[str, Any], keys: dict[str, Any]) -> None:
    assert not find(values, **keys)
