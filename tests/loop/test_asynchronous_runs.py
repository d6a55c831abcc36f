"""Whole asynchronous runs with the embedded engine: repeated and resumed where they are drained and FIFO."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loop.killing import Kill
from loop.runs import grpo, metrics_of
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from support.sweep import sweep

pytestmark = pytest.mark.slow

CHANGES = {"grpo.async_grpo.enabled": True, "grpo.async_grpo.max_trajectory_age_steps": 2, "grpo.use_dynamic_sampling": True}
WEIGHTS = Path("results") / "step_6" / "policy" / "weights" / "model.safetensors"


@pytest.fixture(scope="module")
def drained(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drained")
    outcome = grpo(tiny, folder, **CHANGES)
    assert outcome.code == 0, outcome.err
    assert max(line["train/staleness_max"] for step, line in metrics_of(folder / "logs").items() if step) >= 1
    return folder


@pytest.mark.exhaustive
def test_a_drained_run_that_was_killed_samples_the_same_tokens_and_ends_with_the_same_weights(tiny, tmp_path, drained):
    """The sampler's log-probabilities are the same to rounding: after a kill other requests share the engine's forward passes."""
    buffered = 0
    for kill in (Kill("at the optimizer step", 4), Kill("while generating", 9), Kill("at a save", 1, "after")):
        assert grpo(tiny, tmp_path, before=kill, **CHANGES).code == -signal.SIGKILL
        newest = max((tmp_path / "results").glob("step_*"), key=lambda path: int(path.name[5:]))
        buffered += len(torch.load(newest / "state.pt", weights_only=False)["state"].stream.finished)
    assert grpo(tiny, tmp_path, **CHANGES).code == 0
    assert buffered > 0
    records, wanted = (list(RolloutStore(folder / "logs").read_all()) for folder in (tmp_path, drained))
    for record, other in zip(records, wanted, strict=True):
        assert record.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=1e-5)
        assert replace(record, sampler_logprobs=()) == replace(other, sampler_logprobs=())
    assert (tmp_path / WEIGHTS).read_bytes() == (drained / WEIGHTS).read_bytes()


ORDERS = {
    "in flight": {},
    "windowed": {"order": "windowed", "window": 6, "slots": 9},
    "drop_too_old": {"order": "drop_too_old", "slots": 15},
}


@pytest.mark.parametrize("name", sweep(ORDERS))
def test_every_order_trains(tiny, tmp_path, name):
    changes = {"in_flight_weight_updates": True, **ORDERS[name]}
    outcome = grpo(tiny, tmp_path, **CHANGES, **{f"grpo.async_grpo.{key}": value for key, value in changes.items()})
    assert outcome.code == 0, outcome.err
    lines = [line for step, line in metrics_of(tmp_path / "logs").items() if step]
    assert len(lines) == 6 and all(line["train/staleness_max"] <= 2 for line in lines)
    kept = {record.group for record in RolloutStore(tmp_path / "logs").read_all() if record.kept}
    assert len(kept) == 6 * 4
