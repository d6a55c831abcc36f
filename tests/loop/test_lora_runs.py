"""Whole GRPO runs with adapters: sampler and learner agree, the reference is the base, a killed run goes on, what is saved is a model."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from loop.killing import Kill
from loop.kinds import assert_same_run
from loop.runs import grpo, metrics_of

pytestmark = pytest.mark.slow

LORA: dict[str, Any] = {
    "policy.dtensor_cfg.lora_cfg.enabled": True,
    "policy.dtensor_cfg.lora_cfg.dim": 4,
    "policy.optimizer.kwargs.lr": 0.02,
    "loss_fn.reference_policy_kl_penalty": 0.05,
    "grpo.use_dynamic_sampling": True,
}


def weights(folder: Path, step: int = 6) -> Path:
    return folder / "results" / f"step_{step}" / "policy" / "weights"


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    outcome = grpo(tiny, folder, **LORA)
    assert outcome.code == 0, outcome.err
    return folder


def test_the_policy_leaves_its_reference_and_sampler_and_learner_agree(run: Path) -> None:
    metrics = metrics_of(run / "logs")
    assert list(metrics) == [1, 2, 3, 4, 5, 6]
    assert metrics[1]["train/kl_penalty"] == pytest.approx(0.0, abs=1e-8), "a run begins at its reference"
    assert metrics[6]["train/kl_penalty"] > 1e-4
    for line in metrics.values():
        assert 1 <= line["train/token_mult_prob_error"] < 1.0001 and abs(line["train/gen_kl_error"]) < 1e-8
        assert line["train/grad_norm"] > 0


@pytest.mark.exhaustive
def test_a_killed_run_ends_as_if_nothing_had_happened(run: Path, tiny: Path, tmp_path: Path) -> None:
    for kill in (Kill("while generating", 9), Kill("at a save", 2), Kill("at the optimizer step", 2)):
        outcome = grpo(tiny, tmp_path, before=kill, **LORA)
        assert outcome.code == -signal.SIGKILL, f"it did not come to {kill}: {outcome}"
    assert grpo(tiny, tmp_path, **LORA).code == 0
    assert_same_run(tmp_path, run)
