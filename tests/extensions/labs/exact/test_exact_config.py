"""What ``policy.exact_on_policy`` refuses, and what it makes unnecessary."""

from __future__ import annotations

import pytest

from unit.config.test_config_checks import GPU, VLLM, accepted, refusal

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


def test_turns_may_come_when_environments_answer() -> None:
    turns = ("policy.deterministic=true", GPU, "grpo.max_rollout_turns=3")
    assert "only if their environments answer" in str(accepted(*turns))
    assert "only if their environments answer" not in str(accepted(*turns, EXACT))
