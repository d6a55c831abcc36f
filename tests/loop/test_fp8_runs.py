"""Whole runs whose rollouts are sampled in emulated low precision."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from loop.runs import grpo, metrics_of

ROOT = Path(__file__).parents[1]
CORRECTED: dict[str, Any] = {
    "grpo.val_period": 0,
    "checkpointing.enabled": False,
    "checkpointing.metric_name": None,
    "loss_fn.use_importance_sampling_correction": True,
    "loss_fn.truncated_importance_sampling_type": "tis",
    "loss_fn.truncated_importance_sampling_ratio": 2.0,
}
FP8: dict[str, Any] = {"policy.generation.vllm_cfg.precision": "fp8", "policy.generation.quantization.emulate": True}
SEVENS: dict[str, Any] = {
    **CORRECTED,
    "grpo.max_num_steps": 20,
    "grpo.num_prompts_per_step": 8,
    "data.train.env_name": "sevens",
    "data.validation.env_name": ...,
    "data.validation.size": ...,
    "env.arithmetic.max_operand": ...,
    "env.arithmetic.wording": ...,
    "env.sevens.type": f"{ROOT / 'golden' / 'sevens.py'}:Sevens",
}


def rewards(tiny: Path, folder: Path, **settings: Any) -> list[float]:
    outcome = grpo(tiny, folder, **{**SEVENS, **settings})
    assert outcome.code == 0, outcome.err
    return [line["train/reward"] for line in metrics_of(folder / "logs").values()]


def test_a_run_in_emulated_fp8_measures_its_mismatch_and_keeps_it_over_publishes(tiny: Path, tmp_path: Path) -> None:
    outcome = grpo(tiny, tmp_path, **{**CORRECTED, "grpo.max_num_steps": 2, **FP8})
    assert outcome.code == 0, outcome.err
    errors = [line["train/token_mult_prob_error"] for line in metrics_of(tmp_path / "logs").values()]
    assert 1.0005 < min(errors) <= max(errors) < 1.2


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_rollouts_in_emulated_low_precision_train_to_the_same_reward(tiny: Path, tmp_path: Path) -> None:
    """The last quarter of 20 steps, three seeds each, against the spread of the seeds."""
    modes: dict[str, dict[str, Any]] = {
        "plain": {},
        "fp8_block": FP8,
        "nvfp4": {"policy.generation.quantization.format": "nvfp4", "policy.generation.quantization.emulate": True},
    }
    ends: dict[str, list[float]] = {}
    for name, settings in modes.items():
        curves = [rewards(tiny, tmp_path / f"{name}{seed}", **settings, **{"grpo.seed": seed}) for seed in (1, 2, 3)]
        ends[name] = [mean(curve[-5:]) for curve in curves]
        assert mean(ends[name]) > 1.5 * mean(mean(curve[:3]) for curve in curves), f"{name} learns"
    print({name: [round(end, 4) for end in values] for name, values in ends.items()})
    spread = stdev(ends["plain"])
    for name in ("fp8_block", "nvfp4"):
        assert abs(mean(ends[name]) - mean(ends["plain"])) < 3 * max(spread, 0.02), ends
