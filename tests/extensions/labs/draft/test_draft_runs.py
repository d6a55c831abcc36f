"""Whole GRPO runs with a draft head: the same rollouts as without, drafts that become right, and a killed run that goes on to the bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from loop.killing import Kill
from loop.kinds import assert_same_run
from loop.runs import grpo, metrics_of, repeatable

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

DRAFT: dict[str, Any] = {
    "policy.draft.enabled": True,
    "policy.draft.head_lr": 0.01,
    "policy.generation.torch_cfg.speculative_draft": 2,
}
# Drafts of a validation count in the acceptance rate of the step after it, which a resumed run begins with.
SILENT: dict[str, Any] = {
    "grpo.val_period": 0,
    "checkpointing.metric_name": None,
    "data.validation.env_name": ...,
    "data.validation.size": ...,
}


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    outcome = grpo(tiny, folder, **SILENT, **DRAFT)
    assert outcome.code == 0, outcome.err
    return folder


def test_the_run_is_the_one_without_a_head_but_for_what_is_said_of_it(run: Path, tiny: Path, tmp_path: Path) -> None:
    assert grpo(tiny, tmp_path, **SILENT).code == 0
    with_head, without = (repeatable(metrics_of(folder / "logs")) for folder in (run, tmp_path))
    for step, line in without.items():
        for name, value in line.items():
            assert with_head[step][name] == pytest.approx(value, rel=1e-4, abs=1e-6), (step, name)
    said = {name for name in with_head[6] if "draft" in name or "acceptance" in name}
    assert {"train/draft_loss", "train/draft_acceptance", "train/draft_grad_norm", "generation/acceptance_rate"} <= said


def test_the_head_learns_to_propose(run: Path) -> None:
    lines = metrics_of(run / "logs")
    assert lines[6]["train/draft_loss"] < lines[1]["train/draft_loss"] - 0.5
    assert lines[6]["train/draft_acceptance"] > lines[1]["train/draft_acceptance"]


def test_a_killed_run_ends_as_if_nothing_had_happened(run: Path, tiny: Path, tmp_path: Path) -> None:
    for kill in (Kill("while generating", 9), Kill("at a save", 2), Kill("at the optimizer step", 2)):
        outcome = grpo(tiny, tmp_path, before=kill, **SILENT, **DRAFT)
        assert outcome.code == -signal.SIGKILL, f"it did not come to {kill}: {outcome}"
    assert grpo(tiny, tmp_path, **SILENT, **DRAFT).code == 0
    assert_same_run(tmp_path, run)
