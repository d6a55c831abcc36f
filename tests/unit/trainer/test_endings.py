"""A run is finished, or stopped on request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from loop.fakes import FakeCheckpoints, FakeLearner, Recorder, make_run
from loop.tiny import tiny_tokenizer
from strop.stopping import EarlyStop
from strop.trainer.run import TrainingRun, TrainOptions
from strop.trainer.train import train

TOKENIZER = tiny_tokenizer()
NOTE = "SIGTERM: this run ends after step {}"


def run_of(folder: Path, *, stop_in_step: int | None = None, **changes: Any) -> tuple[TrainingRun, Recorder]:
    """A run of four steps, which is told to stop at the optimizer step of ``stop_in_step``."""
    learner = FakeLearner()
    options = TrainOptions(max_steps=4, groups_per_step=3, val_at_end=True, save_period=100)
    made: dict[str, Any] = {"validation": 1, "checkpoints": FakeCheckpoints(), **changes}
    run, _, tracker = make_run(TOKENIZER, folder, options, learners={"policy": learner}, **made)

    def stop() -> None:
        if learner.steps + 1 == stop_in_step:
            run.stop_request.reason = "SIGTERM"

    learner.on_step = stop
    return run, tracker


def test_a_run_is_finished_after_its_last_step(tmp_path: Path) -> None:
    run, tracker = run_of(tmp_path)
    assert run.ending is None
    asyncio.run(train(run))
    assert run.ending == "finished" and "validation/accuracy" in tracker.steps[4]


def test_a_run_is_finished_after_its_last_task(tmp_path: Path) -> None:
    run, tracker = run_of(tmp_path, tasks=7)
    asyncio.run(train(run))
    assert run.ending == "finished" and run.step == 2 and "validation/accuracy" in tracker.steps[2]


def test_a_run_is_finished_by_early_stopping_and_stays_so(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, early_stop=EarlyStop(metric="train/grad_norm", threshold=2.0))
    asyncio.run(train(run))
    assert run.ending == "finished" and run.step == 2
    again, tracker = run_of(tmp_path, early_stop=run.early_stop)
    again.step = 2
    asyncio.run(train(again))
    assert again.ending == "finished" and again.step == 2 and not tracker.steps


def test_a_run_that_is_stopped_saves_its_step_and_is_not_validated_as_at_its_end(tmp_path: Path) -> None:
    run, tracker = run_of(tmp_path, stop_in_step=2)
    asyncio.run(train(run))
    assert run.ending == "stopped" and run.step == 2
    assert [state.step for state in run.checkpoints.saved] == [2]  # type: ignore[union-attr]
    assert "validation/accuracy" not in tracker.steps[2] and tracker.notes.count(NOTE.format(2)) == 1


def test_a_run_that_is_stopped_before_its_first_step_trains_none(tmp_path: Path) -> None:
    run, tracker = run_of(tmp_path)
    run.stop_request.reason = "SIGTERM"
    asyncio.run(train(run))
    assert run.ending == "stopped" and run.step == 0 and tracker.notes == [NOTE.format(0)]


def test_a_stop_request_in_the_last_step_finds_the_run_finished(tmp_path: Path) -> None:
    run, tracker = run_of(tmp_path, stop_in_step=4)
    asyncio.run(train(run))
    assert run.ending == "finished" and "validation/accuracy" in tracker.steps[4] and NOTE.format(4) in tracker.notes


def test_a_stop_request_in_the_last_validation_is_still_noted(tmp_path: Path) -> None:
    run, tracker = run_of(tmp_path)
    assert run.evaluator is not None
    evaluate = run.evaluator.evaluate

    async def stopped(step: int, tracker: Any) -> dict[str, float]:
        run.stop_request.reason = "SIGTERM"
        return await evaluate(step, tracker)

    run.evaluator.evaluate = stopped  # type: ignore[method-assign]
    asyncio.run(train(run))
    assert run.ending == "finished" and tracker.notes.count(NOTE.format(4)) == 1


@pytest.mark.parametrize(("k", "drain_before"), [(1, "publishing"), (1, "training"), (1, "never"), (0, "never")])
def test_every_step_has_the_time_of_every_phase(tmp_path: Path, k: int, drain_before: Any) -> None:
    options = TrainOptions(max_steps=2, groups_per_step=3, max_staleness=k, drain_before=drain_before)
    run, _, tracker = make_run(TOKENIZER, tmp_path, options)
    progress: list[str] = []
    tracker.progress = progress.append  # type: ignore[method-assign]
    asyncio.run(train(run))
    drains = [text for text in progress if text.startswith("finishing the groups in flight")]
    assert drains == ([f"finishing the groups in flight before {drain_before}"] * 2 if drain_before != "never" else [])
    timing = [name.rpartition("/")[2] for name in tracker.steps[2] if name.startswith("timing/train/")]
    assert timing == [
        "generation", "drain", "packing", "logprobs", "policy_training", "weight_sync", "storing", "validation", "checkpointing",
        "total_step_time",
    ]  # fmt: skip
