"""Whole runs whose vLLM engine drafts with the head that is trained: beside torch in one process, and beside Megatron Core on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loop.runs import metrics_of, overrides, start, tiny_config
from loop.tiny import build_tiny
from support.needs import needs_megatron, needs_vllm

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600)]

STEPS = 3
SETTINGS: dict[str, Any] = {
    "policy.generation.backend": "vllm",
    "policy.generation.vllm_cfg.kv_cache_memory_gb": 0.125,
    "policy.generation.vllm_cfg.num_threads": 1,
    "policy.generation.vllm_cfg.speculation.method": "eagle3",
    "policy.generation.vllm_cfg.speculation.num_speculative_tokens": 2,
    "policy.generation.torch_cfg.kv_cache_memory_gb": ...,
    "policy.generation.weight_sync.proof": "always",
    "policy.generation.max_new_tokens": 12,
    "policy.draft.enabled": True,
    "policy.draft.head_lr": 0.01,
    "grpo.max_num_steps": STEPS,
    "grpo.val_period": 0,
    "data.validation.env_name": ...,
    "data.validation.size": ...,
    "checkpointing.metric_name": None,
    "checkpointing.keep_top_k": ...,
    "logger.console": "plain",
}
RANKS: dict[str, Any] = {
    "cluster.gpus_per_node": 3,
    "policy.megatron_cfg.enabled": True,
    "policy.dtensor_cfg.enabled": False,
    "policy.optimizer.kwargs.lr": ...,
    "policy.generation.colocated.enabled": False,
    "policy.generation.colocated.resources.gpus_per_node": 1,
}


@pytest.mark.parametrize("learner", ["torch", "megatron"])
def test_the_head_is_trained_sent_proven_and_used(learner: str, tmp_path: Path) -> None:
    needs_vllm()
    if learner == "megatron":
        needs_megatron()
        pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    model = build_tiny(tmp_path / "model", head_dim=32)
    settings = {**tiny_config(model), **SETTINGS, **(RANKS if learner == "megatron" else {})}
    outcome = start(["grpo", *overrides(settings)], tmp_path).finish(500)
    assert outcome.code == 0, outcome.err + outcome.out[-4000:]
    lines = metrics_of(tmp_path / "logs")
    assert lines[STEPS]["train/draft_loss"] < lines[1]["train/draft_loss"]
    assert all("generation/acceptance_rate" in line and line["train/token_mult_prob_error"] < 1.001 for line in lines.values())
    assert all(line["weights/tensors_not_read_back"] == 0 for line in lines.values())
    assert (tmp_path / "results" / f"step_{STEPS}" / "policy" / "draft" / "model.safetensors").exists()
