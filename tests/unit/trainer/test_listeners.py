"""What attaches to a run: it sees each step, has a state in checkpoints, may end the run, and never breaks it."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loop.fakes import FakeCheckpoints, make_run, stored_rollouts
from loop.tiny import tiny_tokenizer
from strop.checkpointing.base import RunState
from strop.rollouts.stream import StreamState
from strop.stopping import EndRun
from strop.trainer.listeners import RunListener, StepView
from strop.trainer.run import TrainOptions
from strop.trainer.train import train

TOKENIZER = tiny_tokenizer()


class Counter(RunListener):
    name = "counter"

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.tokens = 0

    async def on_start(self, step: int, tracker: Any) -> None:
        self.seen.append(f"start after {step}")

    async def on_step(self, step: StepView) -> Mapping[str, float]:
        self.seen.append(f"step {step.step}")
        self.tokens += len(step.batch.target)
        return {"counter/tokens": float(self.tokens)}

    async def on_log(self, step: StepView) -> Mapping[str, float]:
        assert step.metrics["counter/tokens"] == self.tokens and "timing/train/total_step_time" in step.metrics
        return {"counter/logged": 1.0}

    async def state_dict(self) -> Any:
        return {"tokens": self.tokens}

    def load_state_dict(self, state: Any) -> None:
        self.tokens = state["tokens"]


class Failing(RunListener):
    name = "failing"

    def __init__(self, method: str, error: Exception, at: int = 2) -> None:
        self.method, self.error, self.at, self.calls = method, error, at, 0

    async def on_step(self, step: StepView) -> Mapping[str, float]:
        return self._call("on_step", step)

    async def on_log(self, step: StepView) -> Mapping[str, float]:
        return self._call("on_log", step)

    def _call(self, method: str, step: StepView) -> Mapping[str, float]:
        self.calls += 1
        if method == self.method and step.step == self.at:
            raise self.error
        return {}


def run_with(tmp_path: Path, *listeners: RunListener, **changes: Any) -> Any:
    options = TrainOptions(max_steps=4, groups_per_step=2, save_period=1)
    run, _, tracker = make_run(TOKENIZER, tmp_path, options, checkpoints=FakeCheckpoints(), store="jsonl", **changes)
    run.listeners.attach(*listeners)
    return run, tracker


def test_a_listener_sees_every_step_and_its_metrics_are_logged_and_its_state_is_saved(tmp_path: Path) -> None:
    counter = Counter()
    run, tracker = run_with(tmp_path, counter)
    asyncio.run(train(run))
    assert counter.seen == ["start after 0", "step 1", "step 2", "step 3", "step 4"]
    assert tracker.steps[4]["counter/tokens"] == counter.tokens > 0 and tracker.steps[4]["counter/logged"] == 1
    last = run.checkpoints.saved[-1]
    assert last.logged["counter/tokens"] == counter.tokens and "counter/logged" not in last.logged
    resumed = Counter()
    other, _ = run_with(tmp_path, resumed)
    other.listeners.load_state_dict(last.listeners)
    assert resumed.tokens == counter.tokens


@pytest.mark.parametrize("method", ["on_step", "on_log"])
def test_a_listener_that_fails_is_reported_and_detached_and_the_run_goes_on(tmp_path: Path, method: str) -> None:
    failing, counter = Failing(method, ZeroDivisionError("by nothing")), Counter()
    run, tracker = run_with(tmp_path, failing, counter)
    asyncio.run(train(run))
    (note,) = [each for each in tracker.notes if "failing" in each]
    assert note.startswith("warning: the listener failing failed and is detached: ZeroDivisionError: by nothing")
    assert run.step == 4 and len(counter.seen) == 5 and failing.calls == (3 if method == "on_step" else 4)
    assert "health/listener_failed" not in tracker.steps[1] and tracker.steps[4]["health/listener_failed"] == 1


def test_a_store_that_fails_ends_no_run(tmp_path: Path) -> None:
    run, tracker = run_with(tmp_path)
    stored_rollouts(run).write = None  # type: ignore[method-assign, assignment]
    asyncio.run(train(run))
    assert run.step == 4 and any("the listener rollouts failed" in note for note in tracker.notes)


@pytest.mark.parametrize("method", ["on_step", "on_log"])
def test_a_listener_ends_the_run_once_the_step_is_stored_saved_and_logged(tmp_path: Path, method: str) -> None:
    run, tracker = run_with(tmp_path, Failing(method, EndRun("enough")))
    with pytest.raises(EndRun, match="enough"):
        asyncio.run(train(run))
    assert max(tracker.steps) == 2 and stored_rollouts(run).steps() == [1, 2]
    assert [state.step for state in run.checkpoints.saved] == [1, 2]


def test_a_run_that_must_not_continue_ends_before_its_first_step(tmp_path: Path) -> None:
    class Refusing(RunListener):
        name = "refusing"

        async def on_start(self, step: int, tracker: Any) -> None:
            raise EndRun("it was stopped")

    run, tracker = run_with(tmp_path, Refusing())
    with pytest.raises(EndRun, match="it was stopped"):
        asyncio.run(train(run))
    assert not tracker.steps


def test_a_listener_without_async_methods_is_reported_too(tmp_path: Path) -> None:
    class Plain(RunListener):
        name = "plain"

        def on_step(self, step: StepView) -> Mapping[str, float]:  # type: ignore[override]
            return {"plain": 1.0}

    run, tracker = run_with(tmp_path, Plain())
    asyncio.run(train(run))
    assert run.step == 4 and any("the listener plain failed" in note for note in tracker.notes)


def test_the_state_of_a_checkpoint_of_earlier_versions_goes_to_its_listener() -> None:
    state = RunState(step=3, stream=StreamState(next_index=0, unfinished=(), finished=()), logged={})
    old = {name: value for name, value in vars(state).items() if name != "listeners"} | {"monitor": {"detectors": {}}}
    read = RunState.__new__(RunState)
    read.__setstate__(dict(old))
    assert read.listeners == {"hacking": {"detectors": {}}} and pickle.loads(pickle.dumps(read)) == read
