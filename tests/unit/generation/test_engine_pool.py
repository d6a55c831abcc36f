"""Several engines as one generator: routing, and engines that die. The engines here are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strop.generation import pool as module
from strop.generation.base import Completion
from strop.generation.pool import EnginePool, Router
from strop.sampling import Sampling
from strop.weight_sync.base import EngineDied
from strop.weight_sync.verification import VerificationFailed

SAMPLING = Sampling(max_new_tokens=1)


@dataclass
class FakeEngine:
    """Answers with its own number; ``dying`` requests kill it first. Like a real one it keeps requests waiting until it has weights."""

    number: int
    dying: int = 0
    alive: bool = True
    asked: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    counted: dict[str, float] = field(default_factory=dict)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    name: str = "a fake"

    def __post_init__(self) -> None:
        self.open.set()

    async def generate(self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "") -> Completion:
        await self.open.wait()
        self.asked.append((tuple(prompt), seed))
        await asyncio.sleep(0)
        if self.dying > 0:
            self.dying -= 1
            self.alive = False
        if not self.alive:
            raise EngineDied(f"engine {self.number}: its process died")
        return Completion(
            tokens=torch.tensor([self.number, seed]),
            logprobs=torch.zeros(2),
            versions=torch.zeros(2, dtype=torch.int32),
            text="",
            stopped=True,
        )

    def counters(self) -> Mapping[str, float]:
        return self.counted

    async def close(self) -> None:
        self.alive = False


@dataclass
class Reviver:
    """Starts fakes anew; ``failing`` of its attempts end with ``error``."""

    failing: int = 0
    error: Callable[[], Exception] = lambda: EngineDied("engine 0 did not start")
    starts_before_it_fails: bool = False
    calls: int = 0

    async def __call__(self, engine: Any) -> None:
        self.calls += 1
        engine.open.clear()
        await asyncio.sleep(0.01)
        if self.failing > 0:
            self.failing -= 1
            engine.alive = self.starts_before_it_fails
            raise self.error()
        engine.alive = True
        engine.open.set()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work, 10)

    return asyncio.run(bounded())


def ask(replicas: EnginePool, prompt: Sequence[int], seed: int = 0, session: str = "") -> Coroutine[Any, Any, Completion]:
    return replicas.generate(prompt, sampling=SAMPLING, seed=seed, session=session)


def engine_of(completion: Completion) -> int:
    return int(completion.tokens[0])


# --- routing --------------------------------------------------------------------------------------------------------------


def test_samples_of_one_prompt_go_to_one_engine_and_prompts_to_the_least_busy_one() -> None:
    router = Router(2)
    places = []
    for prompt in range(6):
        place = router.route((prompt,), "")
        router.running[place] += 4
        assert {router.route((prompt,), "") for _ in range(4)} == {place}
        places.append(place)
    assert sorted(places) == [0, 0, 0, 1, 1, 1]


def test_a_session_stays_with_its_engine_whatever_its_prompt_becomes() -> None:
    router = Router(3)
    router.running = [2, 0, 1]
    assert router.route((1, 2), "talk") == 1
    router.running = [0, 5, 0]
    assert router.route((1, 2, 3, 4), "talk") == 1


def test_an_engine_that_has_many_more_requests_than_the_others_gets_no_new_ones() -> None:
    router = Router(2, imbalance=3)
    assert router.route((1,), "") == 0
    router.running = [3, 0]
    assert router.route((1,), "") == 0
    router.running = [4, 0]
    assert router.route((1,), "") == 1, "waiting costs more than reading again"
    router.running = [0, 0]
    assert router.route((1,), "") == 1, "and the other one has read it now"


def test_the_least_recently_asked_prompts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROUTES", 3)
    router = Router(2)
    for prompt in range(5):
        router.route((prompt,), "")
    assert list(router._owners) == [(2,), (3,), (4,)]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["", "a", "b"])), max_size=60), st.integers(1, 4))
def test_no_engine_is_ever_far_busier_than_the_least_busy_one(requests: list[tuple[int, str]], engines: int) -> None:
    router = Router(engines, imbalance=4)
    for prompt, session in requests:
        router.running[router.route((prompt,), session)] += 1
        assert max(router.running) <= min(router.running) + max(4, min(router.running) // 4) + 1


def test_what_runs_is_counted_down_again_when_requests_end_or_are_cancelled() -> None:
    async def work() -> list[int]:
        engine: Any = FakeEngine(0)
        engine.open.clear()
        replicas = EnginePool([engine])
        waiting = asyncio.create_task(ask(replicas, (1,)))
        await asyncio.sleep(0)
        assert replicas._router.running == [1]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return replicas._router.running

    assert run(work()) == [0]


# --- engines that die -----------------------------------------------------------------------------------------------------


def revived_by(engines: Sequence[Any], reviver: Reviver, **options: Any) -> EnginePool:
    replicas = EnginePool(engines, **options)
    replicas.restart_engine = reviver
    return replicas


def test_requests_of_an_engine_that_died_are_issued_again_with_their_seeds() -> None:
    async def work() -> None:
        engines: list[Any] = [FakeEngine(0, dying=1), FakeEngine(1)]
        reviver = Reviver()
        replicas = revived_by(engines, reviver)
        completions = await asyncio.gather(*(ask(replicas, (1,), seed) for seed in range(5)), ask(replicas, (2,), 9))
        assert [int(completion.tokens[1]) for completion in completions] == [0, 1, 2, 3, 4, 9]
        assert reviver.calls == 1, "whoever comes first starts it, the others wait"
        assert replicas.restarts == 1 and replicas.collect_metrics()["generation/restarts"] == 1
        assert engine_of(completions[-1]) == 1, "the other engine went on"

    run(work())


def test_an_engine_that_does_not_start_is_tried_again_and_nobody_waits_for_one_without_weights() -> None:
    async def work() -> None:
        engine: Any = FakeEngine(0, dying=1)
        reviver = Reviver(failing=2)
        replicas = revived_by([engine], reviver, max_restarts=3)
        assert engine_of(await ask(replicas, (1,))) == 0
        assert reviver.calls == 3 and replicas.restarts == 3

    run(work())


@pytest.mark.parametrize("allowed", [0, 2])
def test_too_many_restarts_in_a_row_end_with_what_to_look_at(allowed: int) -> None:
    async def work() -> None:
        engine: Any = FakeEngine(0, dying=1)
        reviver = Reviver(failing=9)
        replicas = revived_by([engine], reviver, max_restarts=allowed)
        failed = await asyncio.gather(*(ask(replicas, (1,), seed) for seed in range(3)), return_exceptions=True)
        for error in failed:
            assert isinstance(error, EngineDied)
            assert f"it was restarted {allowed} times" in str(error) and "max_restarts" in str(error)
        assert reviver.calls == allowed

    run(work())


def test_an_answer_between_them_makes_restarts_no_row() -> None:
    async def work() -> None:
        engine: Any = FakeEngine(0)
        replicas = revived_by([engine], Reviver(), max_restarts=1)
        for death in range(4):
            engine.dying = 1
            await ask(replicas, (death,))
        assert replicas.restarts == 4

    run(work())


def test_an_engine_that_lives_but_failed_its_proof_keeps_nobody_waiting_until_the_next_publish() -> None:
    async def work() -> None:
        engine: Any = FakeEngine(0, dying=1)
        reviver = Reviver(failing=1, error=lambda: VerificationFailed("a tensor is stale"), starts_before_it_fails=True)
        replicas = revived_by([engine], reviver)
        for _ in range(2):
            with pytest.raises(VerificationFailed, match="stale"):
                await ask(replicas, (1,))
        engine.open.set()
        replicas.set_version(3)
        assert engine_of(await ask(replicas, (1,))) == 0 and replicas.version == 3

    run(work())


@pytest.mark.parametrize("error", [EngineDied("it died again"), VerificationFailed("a tensor is stale")], ids=["dies", "unfit"])
def test_a_request_that_comes_while_an_engine_is_started_hears_of_its_failure(error: Exception) -> None:
    async def work() -> None:
        engine: Any = FakeEngine(0, dying=1)
        unfit = isinstance(error, VerificationFailed)
        replicas = revived_by([engine], Reviver(failing=9, error=lambda: error, starts_before_it_fails=unfit), max_restarts=1)
        first = asyncio.create_task(ask(replicas, (1,)))
        while not replicas._reviving:
            await asyncio.sleep(0)
        failed = await asyncio.gather(first, ask(replicas, (2,)), return_exceptions=True)
        assert [str(error) in str(found) for found in failed] == [True, True]

    run(work())


def test_a_request_that_is_cancelled_does_not_stop_the_restart_that_others_wait_for() -> None:
    async def work() -> None:
        engine: Any = FakeEngine(0, dying=1)
        replicas = revived_by([engine], Reviver())
        first, second = (asyncio.create_task(ask(replicas, (1,), seed)) for seed in range(2))
        while not replicas._reviving:
            await asyncio.sleep(0)
        first.cancel()
        assert int((await second).tokens[1]) == 1
        assert first.cancelled()

    run(work())


def test_rates_are_of_what_happened_since_they_were_last_asked_for() -> None:
    engines: list[Any] = [FakeEngine(0), FakeEngine(1)]
    engines[0].counted = {"prefix_queries": 10.0, "prefix_hits": 5.0, "drafted_tokens": 8.0, "accepted_tokens": 2.0}
    engines[1].counted = {"prefix_queries": 10.0, "prefix_hits": 10.0, "drafted_tokens": 8.0, "accepted_tokens": 4.0}
    engines[1].counted |= {"engine_steps": 4.0, "running_requests": 12.0, "waiting_requests": 2.0}
    replicas = EnginePool(engines)
    first = replicas.collect_metrics()
    assert first["generation/prefix_hit_rate"] == 0.75 and first["generation/acceptance_rate"] == 0.375
    assert (first["generation/running_requests"], first["generation/waiting_requests"]) == (3.0, 0.5)
    assert "generation/acceptance_rate" not in replicas.collect_metrics(), "nothing was drafted since"
    engines[0].counted = {**engines[0].counted, "drafted_tokens": 12.0, "accepted_tokens": 6.0}
    assert replicas.collect_metrics()["generation/acceptance_rate"] == 1.0
