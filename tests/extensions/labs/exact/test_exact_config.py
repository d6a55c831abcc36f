"""What ``policy.exact_on_policy`` refuses, and what it makes unnecessary."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.config import GrpoRunConfig, load_config
from strop.runs.dry_run.examined_models import find_network_problems
from support.every_family import build
from unit.config.test_config_checks import GPU, RUN, VLLM, accepted, refusal

EXACT = "policy.exact_on_policy=true"


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        (["policy.compile=true"], "policy.compile", "operations of a fixed order"),
        (["policy.sequence_packing.enabled=false"], "policy.sequence_packing.enabled", "reads packed rows"),
        (["policy.generation.keep_sampling_mask=true"], "policy.generation.keep_sampling_mask", "without a record of them"),
        ([VLLM, "policy.device=cpu"], "policy.exact_on_policy", "vLLM's batch-invariant mode exists only on GPUs"),
        (["cluster.backend=ray"], "policy.exact_on_policy", "separate processes (Ray)"),
    ],
)
def test_what_has_no_fixed_order_is_refused(overrides: list[str], key: str, reason: str) -> None:
    text = str(refusal(EXACT, *overrides))
    assert f"{key}: found" in text and reason in text
    assert not [problem for problem in accepted(EXACT) if "policy.compile" in problem]  # auto leaves layers as they are


@pytest.mark.parametrize(
    ("family", "layers"),
    [("qwen3_next", "recurrent layers"), ("nemotron_h", "recurrent layers"), ("axk2", "sparse attention"), ("llama", "")],
)
def test_layers_without_a_fixed_order_are_refused_from_config_json_alone(family: str, layers: str, tmp_path: Path) -> None:
    build(family).config.save_pretrained(tmp_path)
    config = load_config(None, [*RUN, EXACT, f"policy.model_name={tmp_path}"], root=GrpoRunConfig).config
    found = [(problem.key, f"has {layers}" in str(problem)) for problem in find_network_problems(config)]
    assert found == ([] if family == "llama" else [("policy.exact_on_policy", True)])


def test_turns_may_come_when_environments_answer() -> None:
    turns = ("policy.deterministic=true", GPU, "grpo.max_rollout_turns=3")
    assert "only if their environments answer" in str(accepted(*turns))
    assert "only if their environments answer" not in str(accepted(*turns, EXACT))
