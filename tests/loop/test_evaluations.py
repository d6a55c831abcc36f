"""Whole evaluations: killed and continued, with engines in processes of their own, and the commands that users know."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from loop.killing import Kill
from loop.runs import Environ, Outcome, overrides, start, strop
from loop.tiny import build_tiny
from support.hub import HUB
from support.needs import needs_vllm

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.timeout(600)]

SETTINGS: dict[str, Any] = {
    "generation.vllm_cfg.max_model_len": 64,
    "generation.precision": "float32",
    "generation.device": "cpu",
    "generation.num_threads": 1,
    "generation.temperature": 1.0,
    "generation.max_new_tokens": 4,
    "generation.torch_cfg.kv_cache_memory_gb": 0.01,
    "eval.num_tests_per_prompt": 4,
    "eval.k_value": 2,
    "eval.save_path": "evaluation",
    "data.env_name": "arithmetic",
    "data.size": 8,
    "data.max_input_seq_length": 60,
    "env.arithmetic.max_operand": 3,
    "env.arithmetic.wording": "{expression}=",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model") / "tiny")


def evaluate(model: Path, folder: Path, *, before: Any = None, timeout: float = 200, **changes: Any) -> Outcome:
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    settings = {"generation.model_name": str(model), **SETTINGS, **changed}
    return start(["eval", "--json", *overrides(settings)], folder, before=before).finish(timeout)


def read(folder: Path) -> Any:
    return json.loads((folder / "evaluation" / "step_000000.json").read_text())


def test_an_evaluation_that_is_killed_continues_to_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    one_by_one = {"generation__num_prompts_per_step": 1}
    assert evaluate(tiny, tmp_path / "whole", **one_by_one).code == 0
    killed = evaluate(tiny, tmp_path / "parts", before=Kill("while generating", 10), **one_by_one)
    assert killed.code == -9
    kept = (tmp_path / "parts/evaluation/tasks.jsonl").read_text().splitlines()
    assert 1 < len(kept) < 9
    continued = evaluate(tiny, tmp_path / "parts", **one_by_one)
    assert continued.code == 0 and f"{len(kept) - 1} task" in continued.err
    files = [(tmp_path / folder / "evaluation/step_000000.json").read_bytes() for folder in ("whole", "parts")]
    assert files[0] == files[1]


def test_two_torch_engines_over_ray_say_what_one_in_this_process_says(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'strop[ray]'")
    assert evaluate(tiny, tmp_path / "here").code == 0
    over_ray = evaluate(
        tiny, tmp_path / "ray", cluster__backend="ray", cluster__gpus_per_node=2, generation__torch_cfg__num_engines=2
    )
    assert over_ray.code == 0, over_ray.err
    assert "2 engines share the tasks" in over_ray.err
    assert read(tmp_path / "ray") == read(tmp_path / "here")


@pytest.mark.exhaustive
def test_two_vllm_engines_over_ray_say_what_two_on_this_machine_say(tiny: Path, tmp_path: Path) -> None:
    needs_vllm()
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'strop[ray]'")
    vllm = {"generation__backend": "vllm", "generation__vllm_cfg__kv_cache_memory_gb": 0.125, "generation__temperature": 0.0}
    greedy = {**vllm, "eval__num_tests_per_prompt": 1, "eval__k_value": 1, "generation__vllm_cfg__precision": "float32"}
    found = []
    for name, changes in (("one", {}), ("two", {}), ("ray", {"cluster__backend": "ray", "cluster__gpus_per_node": 2})):
        count = {"generation__vllm_cfg__num_engines": 1 if name == "one" else 2}
        outcome = evaluate(tiny, tmp_path / name, timeout=400, **greedy, **changes, **count)
        assert outcome.code == 0, outcome.out + outcome.err
        found.append([[sample["completion"] for sample in task["samples"]] for task in read(tmp_path / name)["tasks"]])
    assert found[0] == found[1] == found[2]
