"""Runs whose sampler filters its tokens, with what corrects the mismatch: recorded sets, importance weights, rejections."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from loop.runs import grpo, metrics_of

pytestmark = pytest.mark.slow

FILTERED = {
    "policy.generation.top_k": 8,
    "policy.generation.top_p": 0.9,
    "policy.generation.keep_sampling_mask": True,
    "checkpointing.enabled": False,
    "grpo.val_period": 0,
    "grpo.max_num_steps": 4,
}
CORRECTIONS = [{"name": "tis", "cap": 1.5}, {"name": "geometric_rejection", "low": 0.9, "high": 1.1}, {"name": "opsm"}, "kpop"]
SHARES = ("tis_cut", "geometric_rejection_cut", "opsm_cut", "kpop_cut")


def run(tiny: Path, folder: Path, **changes: Any) -> dict[int, dict[str, float]]:
    settings = {**FILTERED, "algorithm.kwargs": {"corrections": CORRECTIONS}, **changes}
    outcome = grpo(tiny, folder, **settings)
    assert outcome.code == 0, outcome.err
    return {step: line for step, line in metrics_of(folder / "logs").items() if step}


@pytest.mark.exhaustive
def test_with_recorded_sets_sampler_and_learner_agree_over_several_steps_of_a_batch(tiny: Path, tmp_path: Path) -> None:
    """A reference, two epochs of two mini-batches: what is scored before the update is over the recorded sets, so nothing is cut."""
    several = {"grpo.update_epochs": 2, "policy.train_global_batch_size": 16, "loss_fn.reference_policy_kl_penalty": 0.1}
    metrics = run(tiny, tmp_path, **several)
    assert len(metrics) == 4
    for line in metrics.values():
        assert 1 <= line["train/token_mult_prob_error"] < 1.0001
        assert line["train/tis_weight"] == pytest.approx(1.0, abs=1e-4)
        # OPSM looks at the policy as it is now, which has moved by the second optimizer step.
        assert all(line[f"train/{share}"] == 0 for share in SHARES if share != "opsm_cut")
    assert all(math.isfinite(line["train/kl_penalty"]) for line in metrics.values())


@pytest.mark.exhaustive
def test_stale_rollouts_are_corrected_and_the_shares_that_were_cut_are_logged(tiny: Path, tmp_path: Path) -> None:
    """A learning rate at which one step of staleness shows: weights leave 1, and some tokens and rollouts are cut."""
    asynchronous = {"grpo.async_grpo.enabled": True, "grpo.async_grpo.max_trajectory_age_steps": 1}
    metrics = run(tiny, tmp_path, **asynchronous, **{"policy.optimizer.kwargs.lr": 0.03, "grpo.max_num_steps": 6})
    assert all(0 <= line[f"train/{share}"] <= 1 for line in metrics.values() for share in SHARES)
    assert any(abs(line["train/tis_weight"] - 1) > 0.01 for line in metrics.values())
    assert any(line["train/geometric_rejection_cut"] > 0 for line in metrics.values())
