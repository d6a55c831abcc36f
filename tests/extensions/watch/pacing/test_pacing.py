"""Concurrency that follows what engines and sandboxes bear, and environments that pause while their infrastructure fails."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loop.fakes import run_virtually
from strop.endings import Ending
from strop.extensions.watch.pacing import FEWEST, WINDOW, AdaptiveConcurrency, CircuitBreaker
from strop.rollouts.stream import EpisodeGate, sample_until_counted
from strop.tools.base import InfrastructureError
from strop.types import Rollout, Task


def ended(ending: Ending) -> Rollout:
    error = f"it is {ending}" if ending.is_failure else None
    prompt = torch.zeros(0, dtype=torch.int64)
    return Rollout(task=Task(id="t"), sample=0, seed=0, messages=(), prompt=prompt, ending=ending, error=error)


# --- concurrency ------------------------------------------------------------------------------------------------------------


async def crowd(gate: AdaptiveConcurrency, count: int, bears: int, seconds: float = 1.0) -> list[int]:
    """Run episodes in a sandbox that bears ``bears`` at once. Returns how many ran when each began."""
    inside, seen = 0, []

    async def episode(attempt: int) -> Rollout:
        nonlocal inside
        inside += 1
        seen.append(inside)
        refused = inside > bears
        await asyncio.sleep(0.1 if refused else seconds)
        inside -= 1
        return ended(Ending.SANDBOX if refused else Ending.STOP)

    await asyncio.gather(*(sample_until_counted("e", episode, retries=0, gates=[gate]) for _ in range(count)))
    return seen


def test_without_a_sign_of_overload_nothing_waits():
    gate = AdaptiveConcurrency(64)
    assert max(run_virtually(crowd(gate, 64, bears=64))) == 64 and gate.limit == 64


def test_the_limit_comes_down_to_what_a_sandbox_bears_and_keeps_it_busy():
    async def main() -> tuple[list[int], float]:
        seen = await crowd(AdaptiveConcurrency(256), 4000, bears=20)
        return seen, asyncio.get_running_loop().time()

    seen, seconds = run_virtually(main())
    assert max(seen[2000:]) <= 22 and sum(each > 20 for each in seen[2000:]) / 2000 < 0.1
    assert seconds < 1.5 * 4000 / 20


def test_one_round_of_refusals_halves_the_limit_once():
    gate = AdaptiveConcurrency(100)

    async def main() -> None:
        async def refused(attempt: int) -> Rollout:
            await asyncio.sleep(1)
            return ended(Ending.PROVIDER_LIMIT)

        await asyncio.gather(*(sample_until_counted("e", refused, retries=0, gates=[gate]) for _ in range(80)))

    run_virtually(main())
    assert gate.limit == 40  # of the 80 that ran at once


def test_preemptions_of_engines_halve_it_and_single_ones_do_not():
    gate = AdaptiveConcurrency(100)
    run_virtually(crowd(gate, 100, bears=100))
    gate.end_step(preemptions=4)
    assert gate.limit == 100
    run_virtually(crowd(gate, 100, bears=100))
    gate.end_step(preemptions=6)
    assert gate.limit == 50
    gate.end_step(preemptions=0)
    assert gate.limit == 50


@given(st.integers(0, 10_000))
def test_places_are_neither_lost_nor_given_twice_whatever_is_cancelled(seed):
    draw = random.Random(seed)
    gate = AdaptiveConcurrency(draw.randint(1, 6))

    async def main() -> None:
        async def episode(attempt: int) -> Rollout:
            assert gate.running <= gate.most
            await asyncio.sleep(draw.expovariate(1.0))
            return ended(draw.choice([Ending.STOP, Ending.SANDBOX, Ending.ENGINE]))

        tasks = []
        for _ in range(40):
            tasks.append(asyncio.ensure_future(sample_until_counted("e", episode, retries=draw.randint(0, 2), gates=[gate])))
            await asyncio.sleep(draw.expovariate(3.0))
            if draw.random() < 0.4:
                draw.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run_virtually(main())
    assert gate.running == 0 and not gate._waiting and 1 <= gate.limit <= gate.most


# --- breakers ---------------------------------------------------------------------------------------------------------------


class Service:
    """Infrastructure that is down from ``down`` to ``up`` (seconds); an episode takes one second."""

    def __init__(self, down: float, up: float) -> None:
        self.down, self.up = down, up
        self.calls: list[float] = []

    async def episode(self, attempt: int) -> Rollout:
        now = asyncio.get_running_loop().time()
        self.calls.append(now)
        await asyncio.sleep(1)
        return ended(Ending.SERVICE if self.down <= now < self.up else Ending.STOP)


def breaker(notes: list[str], **options: Any) -> CircuitBreaker:
    return CircuitBreaker(**{"share": 0.5, "max_pause": 600.0, "note": notes.append, **options})


async def use(service: Service, gate: EpisodeGate, *, waves: int = 40, width: int = 8, name: str = "e") -> list[Rollout]:
    """Run waves of episodes, one after another."""
    rollouts = []
    for _ in range(waves):
        episodes = (sample_until_counted(name, service.episode, retries=0, gates=[gate]) for _ in range(width))
        rollouts += await asyncio.gather(*episodes)
    return rollouts


def test_an_outage_pauses_the_environment_and_what_fails_meanwhile_is_sampled_again():
    notes: list[str] = []
    service, gate = Service(10, 100), breaker(notes)
    rollouts = run_virtually(use(service, gate))
    failed = [rollout for rollout in rollouts if rollout.error is not None]
    assert 0 < len(failed) <= WINDOW and len(rollouts) == 320  # those that opened it
    tests = [now for now in service.calls if 14 < now < 100]
    assert len(tests) < 10, "one at a time, ever later"
    assert len(notes) == 2 and "e is paused" in notes[0] and "it is service" in notes[0] and "works again" in notes[1]
    assert 80 < gate.paused < 160 and not gate.outages


def test_another_environment_goes_on_meanwhile():
    async def main() -> float:
        gate = breaker([])
        broken, sound = Service(10, 500), Service(0, 0)
        ends = asyncio.ensure_future(use(broken, gate, name="broken"))
        await use(sound, gate, name="sound")
        seconds = asyncio.get_running_loop().time()
        await ends
        return seconds

    assert run_virtually(main()) == 40


def test_an_outage_that_lasts_ends_the_run_in_words():
    with pytest.raises(
        InfrastructureError, match=r"e has been paused for 10 minutes \(pacing.max_pause_minutes\).*it is service"
    ):
        run_virtually(use(Service(10, 1e9), breaker([])))


def test_an_environment_that_never_worked_is_not_paused():
    """It is configured wrongly: its groups are dropped, which ends the run at once (max_errors_in_a_row)."""
    notes: list[str] = []
    rollouts = run_virtually(use(Service(0, 1e9), breaker(notes)))
    assert all(rollout.error for rollout in rollouts) and not notes


@pytest.mark.parametrize("ending", [Ending.CRASH, Ending.TIME, Ending.ERROR, Ending.BROKEN_TASK, Ending.ABORTED])
def test_failures_that_are_not_the_infrastructures_pause_nothing(ending):
    gate = breaker([])
    gate.observe("e", ended(Ending.STOP))
    assert not any(gate.observe("e", ended(ending)) for _ in range(100)) and not gate.outages


def test_few_failures_pause_nothing():
    gate = breaker([])

    async def main() -> list[bool]:
        gate.observe("e", ended(Ending.STOP))
        return [gate.observe("e", ended(Ending.SANDBOX)) for _ in range(FEWEST - 1)]

    assert run_virtually(main()) == [False] * (FEWEST - 2) + [True]
