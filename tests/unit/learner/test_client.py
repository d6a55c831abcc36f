"""Learners as the loop awaits them: inline and in a thread of their own."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time
from typing import Any

import pytest
import torch

from loop.fakes import FakeLearner
from loop.tiny import tiny_tokenizer
from strop.algorithms.base import TokenOutputs
from strop.learner.client import ColumnClient, InlineCaller, LearnerThread, ThreadCaller
from support.algorithms import grpo
from support.clients import learner_client, threaded_client

TOKENIZER = tiny_tokenizer()
SEEN: contextvars.ContextVar[str] = contextvars.ContextVar("seen", default="nothing")


class Watched(FakeLearner):
    """Notes where it is called, and takes its time."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds
        self.threads: list[int] = []
        self.computation_threads: list[int] = []
        self.contexts: list[str] = []
        self.gradients: list[bool] = []

    async def score(self, batch: Any) -> TokenOutputs:
        self.threads.append(threading.get_ident())
        self.computation_threads.append(torch.get_num_threads())
        self.contexts.append(SEEN.get())
        self.gradients.append(torch.is_grad_enabled())
        time.sleep(self.seconds)
        return await super().score(batch)


def batch() -> Any:
    from strop.types import Group, Rollout, Task, Turn
    from support.rollouts import pack_for

    turn = Turn(
        author="policy", tokens=torch.arange(3), text="", logprobs=torch.zeros(3), versions=torch.zeros(3, dtype=torch.int32)
    )
    rollouts = tuple(
        Rollout(task=Task(id="0"), sample=i, seed=0, messages=(), prompt=torch.arange(2), turns=(turn,), reward=float(i))
        for i in range(2)
    )
    return pack_for([Group(index=0, environment="e", version=0, rollouts=rollouts)], grpo())


def test_the_event_loop_goes_on_while_the_learner_computes():
    learner = Watched(seconds=0.3)

    async def play() -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        await threaded_client(learner).score(batch())
        ticking.cancel()
        return ticks

    assert asyncio.run(play()) >= 5
    assert learner.threads != [threading.get_ident()]


def test_every_call_runs_in_the_same_thread_one_after_another_with_the_callers_context_and_settings():
    first, second = Watched(seconds=0.02), Watched(seconds=0.02)
    before = torch.get_num_threads()

    async def play() -> None:
        thread = LearnerThread()
        SEEN.set("the run's")
        learner, scorer = threaded_client(first, thread), threaded_client(second, thread)
        await asyncio.gather(*(each.score(batch()) for each in (learner, scorer, learner, scorer)))
        with torch.no_grad():
            await learner.score(batch())

    torch.set_num_threads(3)
    try:
        asyncio.run(play())
    finally:
        torch.set_num_threads(before)
    assert len({*first.threads, *second.threads}) == 1
    assert {*first.computation_threads, *second.computation_threads} == {3}
    assert {*first.contexts} == {"the run's"}
    assert first.gradients == [True, True, False]


@pytest.mark.parametrize("threaded", [False, True])
def test_a_column_source_is_awaited_where_it_is_called(threaded):
    class Constant:
        def columns(self, batch: Any, groups: Any) -> dict[str, Any]:
            return {"thread": threading.get_ident(), "groups": groups}

    caller = ThreadCaller(Constant(), LearnerThread()) if threaded else InlineCaller(Constant())
    found = asyncio.run(ColumnClient(caller).columns(batch(), ("group",)))
    assert (found["thread"] != threading.get_ident()) == threaded and found["groups"] == ("group",)


def test_a_learner_called_inline_blocks_the_event_loop():
    """It shares its module with an engine, so the two take turns."""

    class Sleeper:
        def step(self) -> dict[str, Any]:
            time.sleep(0.1)
            return {}

    async def play() -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        await learner_client(Sleeper()).step()
        ticking.cancel()
        return ticks

    assert asyncio.run(play()) == 0


def test_an_exception_of_the_learner_is_raised_where_it_was_called():
    class Broken(FakeLearner):
        async def step(self) -> Any:
            raise FloatingPointError("the gradient is a pudding")

    learner = threaded_client(Broken())
    with pytest.raises(FloatingPointError, match="pudding") as caught:
        asyncio.run(learner.step())
    assert any(frame.name == "step" and frame.path.name == "test_client.py" for frame in caught.traceback)


def test_a_cancelled_caller_waits_for_the_call_in_progress():
    learner = Watched(seconds=0.2)

    async def play() -> tuple[float, int]:
        calling = asyncio.create_task(threaded_client(learner).score(batch()))
        await asyncio.sleep(0.05)
        started = time.perf_counter()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        return time.perf_counter() - started, learner.scored

    waited, scored = asyncio.run(play())
    assert waited > 0.08 and scored == 1, "the call was over when the caller went on"


def test_a_caller_that_is_cancelled_twice_does_not_wait():
    learner = Watched(seconds=1.0)

    async def play() -> float:
        calling = asyncio.create_task(threaded_client(learner).score(batch()))
        await asyncio.sleep(0.05)
        started = time.perf_counter()
        calling.cancel()
        await asyncio.sleep(0.02)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        return time.perf_counter() - started

    assert asyncio.run(play()) < 0.6


def test_the_thread_ends_with_its_last_user():
    def use() -> str:
        thread = LearnerThread("strop-short-lived")
        asyncio.run(threaded_client(FakeLearner(), thread).score(batch()))
        return next(each.name for each in threading.enumerate() if each.name.startswith("strop-short-lived"))

    name = use()
    gc.collect()
    deadline = time.monotonic() + 5
    while any(each.name == name for each in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread outlives its learner"
        time.sleep(0.01)


def test_closing_ends_the_thread():
    thread = LearnerThread("strop-closed")
    learner = threaded_client(FakeLearner(), thread)
    asyncio.run(learner.score(batch()))
    thread.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        asyncio.run(learner.score(batch()))
