"""A whole run whose vLLM engine drafts with the head that it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loop.runs import metrics_of, overrides, start, tiny_config
from loop.tiny import build_tiny
from support.needs import needs_vllm

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


def train_a_head(tmp_path: Path, changes: dict[str, Any]) -> None:
    needs_vllm()
    model = build_tiny(tmp_path / "model", head_dim=32)
    settings = {**tiny_config(model), **SETTINGS, **changes}
    outcome = start(["grpo", *overrides(settings)], tmp_path).finish(500)
    assert outcome.code == 0, outcome.err + outcome.out[-4000:]
    lines = metrics_of(tmp_path / "logs")
    assert lines[STEPS]["train/draft_loss"] < lines[1]["train/draft_loss"]
    assert all("generation/acceptance_rate" in line and line["train/token_mult_prob_error"] < 1.001 for line in lines.values())
    assert all(line["weights/tensors_not_read_back"] == 0 for line in lines.values())
    assert (tmp_path / "results" / f"step_{STEPS}" / "policy" / "draft" / "model.safetensors").exists()
