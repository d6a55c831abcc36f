"""What the loop and the episodes wait for has a name while they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from loop.fakes import FakeLearner, Letters, make_run, run_virtually, stored_rollouts
from loop.tiny import tiny_tokenizer
from strop.environments.base import reward
from strop.generation.generation_config import MismatchConfig
from strop.monitoring.waits import describe_wait, snapshot_waits
from strop.trainer.listeners import PHASE_KINDS, StepTimer
from strop.trainer.mismatch import MismatchGuard, MismatchTooLarge
from strop.trainer.run import TrainOptions
from strop.trainer.train import train
from strop.types import Messages, Rollout, Task

TOKENIZER = tiny_tokenizer()


def options(**changes: Any) -> TrainOptions:
    return TrainOptions(**{"max_steps": 2, "groups_per_step": 2, **changes})


def innermost() -> str:
    waits = snapshot_waits()
    (mine,) = [wait for wait in snapshot_waits(loop=asyncio.get_running_loop()) if wait.running][-1:]
    return describe_wait(mine, waits)


@dataclass(frozen=True, kw_only=True)
class Telling(Letters):
    """Notes what is waited for whenever it is called."""

    seen: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def session(self, task: Task) -> AsyncIterator[None]:
        self.seen.append(innermost())
        yield
        self.seen.append(innermost())

    async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
        await asyncio.sleep(0.5)
        self.seen.append(innermost())
        return None

    @reward(weight=1.0)
    async def slow(self, task: Task, rollout: Rollout) -> float:
        await asyncio.sleep(0.5)
        self.seen.append(innermost())
        return 0.0


def test_every_call_of_an_environment_is_a_wait_with_its_chain(tmp_path):
    environment = Telling()
    run, generator, _ = make_run(TOKENIZER, tmp_path, options(max_steps=1, groups_per_step=1), environment=environment, samples=1)
    engine: list[str] = []
    generator.latency = lambda seed: engine.append(innermost()) or 0.1
    run_virtually(train(run))
    chain = "training loop -> generation -> group 0 (task 0 of letters) -> sample 0 -> "
    calls = ["opening its session", "turn 1", "rewards", "closing its session"]
    assert environment.seen == [f"{chain}environment Telling, {call} (task 0)" for call in calls]
    assert engine == [f"{chain}engine, turn 1"]
    assert snapshot_waits() == ()


def test_groups_that_were_begun_ahead_belong_to_the_step_that_waits_for_them(tmp_path):
    environment = Telling()
    run, _, _ = make_run(TOKENIZER, tmp_path, options(max_steps=4, max_staleness=1), environment=environment, samples=1)
    run_virtually(train(run))
    assert all(text.startswith(("training loop -> ", "generation -> group ")) for text in environment.seen)
    assert sum(text.startswith("training loop -> generation -> group ") for text in environment.seen) > 8
    assert snapshot_waits() == ()


def test_an_episode_that_fails_leaves_no_wait_open(tmp_path):
    run, _, _ = make_run(TOKENIZER, tmp_path, options(), environment=Letters(broken=(0,)))
    asyncio.run(train(run))
    assert snapshot_waits() == ()


def test_phases_are_waits_with_the_limits_of_their_kind():
    timer = StepTimer()
    for phase, kind in {"generation": "", "policy_training": "training", "weight_sync": "weight_sync", **PHASE_KINDS}.items():
        with timer.span(phase):
            (wait,) = snapshot_waits()
            assert (wait.who, wait.on, wait.kind) == ("training loop", phase, kind)
    assert snapshot_waits() == () and set(timer.seconds) >= set(PHASE_KINDS)


def test_a_step_whose_sampler_and_learner_disagree_is_warned_of_and_ends_the_run_if_asked_to(tmp_path):
    learner = FakeLearner(shift=0.5)  # and a tenth more each step
    run, _, tracker = make_run(TOKENIZER, tmp_path, options(max_steps=5), learners={"policy": learner}, store="jsonl")
    run.listeners.attached[0] = MismatchGuard(MismatchConfig(warn=1.2, stop=1.7, stop_after=2))
    with pytest.raises(MismatchTooLarge, match=r"step 3: .* factor of 2\.014"):
        asyncio.run(train(run))
    (warning,) = [note for note in tracker.notes if note.startswith("warning: mismatch")]
    assert "step 1: " in warning and "factor of 1.649" in warning
    assert tracker.steps[1]["train/token_mult_prob_error"] == pytest.approx(1.6487, abs=1e-3)
    assert [row.log_ratio for row in stored_rollouts(run).read_ratios(1)] == pytest.approx(
        [0.5] * len(stored_rollouts(run).read_ratios(1))
    )
    assert len(stored_rollouts(run).read_ratios(3)) > 0  # of the step that ended the run, too
