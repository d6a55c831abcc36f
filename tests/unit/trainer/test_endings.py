"""A run is finished, or stopped on request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loop.fakes import FakeCheckpoints, FakeLearner, Recorder, make_run
from loop.tiny import tiny_tokenizer
from strop.checkpointing.base import RunState
from strop.learner.client import LearnerClient
from strop.monitoring.trackers.base import NullTracker
from strop.rollouts.stream import StreamState
from strop.stopping import EarlyStop
from strop.storage.files import StorageError
from strop.trainer.cadence import save_if_due
from strop.trainer.listeners import Listeners
from strop.trainer.run import Saved, TrainingRun, TrainOptions
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


@dataclass
class FullDisk:
    """Checkpoints that the file system refuses ``times`` times."""

    times: int
    saved: list[int] = field(default_factory=list)

    def save(self, state: RunState, learners: object) -> Path:
        self.times -= 1
        if self.times >= 0:
            raise StorageError(f"the checkpoint of step {state.step} was not saved: the disk is full")
        self.saved.append(state.step)
        return Path(f"step_{state.step}")

    def finish(self) -> None:
        pass


def saving_run(checkpoints: FullDisk, **changes: Any) -> Any:
    run = SimpleNamespace(options=SimpleNamespace(save_period=5), step=5, ending=None, saved=Saved(), checkpoints=checkpoints)
    values = {
        "learners": {},
        "saved_parts": {},
        "tracker": NullTracker(),
        "last_metrics": {},
        "early_stop": None,
        "listeners": Listeners(),
    }
    run.__dict__.update(values | changes)
    return run


STREAM = StreamState(next_index=0, unfinished=(), finished=())


def test_a_checkpoint_that_finds_no_room_is_saved_at_the_next_step_and_the_period_goes_on() -> None:
    run = saving_run(FullDisk(1))
    for run.step in range(5, 11):
        asyncio.run(save_if_due(run, STREAM))
        assert run.saved.failed == (run.step == 5)
    assert run.checkpoints.saved == [6, 10] and run.saved.step == 10


def test_the_last_checkpoint_is_tried_twice_and_then_an_error() -> None:
    run = saving_run(FullDisk(1), ending="finished", step=7)
    asyncio.run(save_if_due(run, STREAM))
    assert run.checkpoints.saved == [7]
    with pytest.raises(StorageError, match="the checkpoint of step 7 was not saved"):
        asyncio.run(save_if_due(saving_run(FullDisk(2), ending="finished", step=7), STREAM))


def test_ranks_in_other_processes_do_not_go_on_after_a_refused_save() -> None:
    """One of them may wait in a collective for the one that failed."""
    run = saving_run(FullDisk(1), learners={"policy": LearnerClient(caller=object())})  # type: ignore[arg-type]
    with pytest.raises(StorageError):
        asyncio.run(save_if_due(run, STREAM))
