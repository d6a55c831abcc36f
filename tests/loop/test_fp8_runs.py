"""Whole runs whose rollouts are sampled in emulated low precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loop.runs import grpo, metrics_of

CORRECTED: dict[str, Any] = {
    "grpo.val_period": 0,
    "checkpointing.enabled": False,
    "checkpointing.metric_name": None,
    "loss_fn.use_importance_sampling_correction": True,
    "loss_fn.truncated_importance_sampling_type": "tis",
    "loss_fn.truncated_importance_sampling_ratio": 2.0,
}
FP8: dict[str, Any] = {"policy.generation.vllm_cfg.precision": "fp8", "policy.generation.quantization.emulate": True}


def test_a_run_in_emulated_fp8_measures_its_mismatch_and_keeps_it_over_publishes(tiny: Path, tmp_path: Path) -> None:
    outcome = grpo(tiny, tmp_path, **{**CORRECTED, "grpo.max_num_steps": 2, **FP8})
    assert outcome.code == 0, outcome.err
    errors = [line["train/token_mult_prob_error"] for line in metrics_of(tmp_path / "logs").values()]
    assert 1.0005 < min(errors) <= max(errors) < 1.2
