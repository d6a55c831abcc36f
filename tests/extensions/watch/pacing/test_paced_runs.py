"""The real loop, stream and episodes on a virtual clock: what early aborts and adaptive concurrency change in a run."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loop.fakes import Letters, Recorder, Tasks, make_run, run_virtually
from loop.tiny import tiny_tokenizer
from strop.data.sources.source import DataSource
from strop.endings import Ending, RolloutFailed
from strop.environments.base import reward
from strop.environments.handle import LocalEnvironment
from strop.extensions.watch.pacing import AdaptiveConcurrency
from strop.models.chat_template import ChatTemplate
from strop.rollouts.episode import EpisodeRules, run_group
from strop.rollouts.stream import DropTooOld, EpisodeGate, Fifo, GroupOrder, RolloutStream, Windowed, is_beyond_training
from strop.sampling import Sampling
from strop.trainer.listeners import Listeners
from strop.trainer.run import TrainOptions
from strop.trainer.train import train
from strop.types import Group, Rollout, Task

SAMPLES, PER_STEP, STALENESS = 4, 4, 2


@cache
def tokenizer() -> Any:
    return tiny_tokenizer()


@dataclass(frozen=True, kw_only=True)
class World(Letters):
    """Every tenth task is slow; its sandbox bears ``bears`` rollouts at once and refuses others."""

    seconds: float = 1.0
    slow_seconds: float = 1.0
    bears: int = 10**9
    fails: float = 0.0  # share of rollouts that fail, of each kind
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    inside: list[Task] = field(default_factory=list)

    @reward(weight=0.0)
    async def work(self, task: Task, rollout: Rollout) -> float:
        if len(self.inside) >= self.bears:
            await asyncio.sleep(2.0)
            raise RolloutFailed("the sandbox is full", Ending.SANDBOX)
        self.inside.append(task)
        try:
            await asyncio.sleep(self.slow_seconds if int(task.id) % 10 == 0 else self.seconds)
        finally:
            self.inside.remove(task)
        kind = self.draw.random()
        if kind < self.fails:
            raise RolloutFailed("it hung", Ending.TIME)
        if kind < 2 * self.fails:
            raise RolloutFailed("no connection", Ending.SERVICE)
        if kind < 2.2 * self.fails:
            raise LookupError("a bug")
        return 0.0


@dataclass(frozen=True)
class Result:
    seconds: float
    tokens: int  # trained on
    thrown_away: float  # share of all rollouts
    staleness: float
    tracker: Recorder


def run_world(
    world: World, folder: Path, *, order: GroupOrder, slots: int, steps: int, aborts: bool, gates: tuple[EpisodeGate, ...] = ()
) -> Result:
    options = TrainOptions(
        max_steps=steps,
        groups_per_step=PER_STEP,
        max_staleness=STALENESS,
        drop_stale=order.drops_stale,
        max_errors_in_a_row=10**6,
    )
    run, generator, tracker = make_run(tokenizer(), folder, options, environment=world, latency=lambda seed: 1.0)
    run.listeners = Listeners()  # the fake learner drifts from the sampler
    source = Tasks(LocalEnvironment(world), world.tasks(DataSource()))
    sampled = [0]

    async def group(index: int) -> Group:
        name, environment, task = source.at(index)
        version = generator.version

        def is_lost(ended: Any) -> bool:
            stale = order.drops_stale and generator.version - version > STALENESS
            return stale or is_beyond_training(ended, SAMPLES, 2)

        done = await run_group(
            index, name, environment, task, samples=SAMPLES, generator=generator, template=ChatTemplate(tokenizer()), seed=7,
            sampling=Sampling(max_new_tokens=8), rules=EpisodeRules(max_length=200), gates=gates, is_lost=is_lost if aborts else None,
        )  # fmt: skip
        sampled[0] += len(done.rollouts)
        return done

    run.stream = RolloutStream(group, slots=slots, refill_on_release=True, order=order, version=lambda: generator.version)

    async def main() -> float:
        await train(run)
        return asyncio.get_running_loop().time()

    seconds = run_virtually(main())
    batches = run.learners["policy"].batches  # type: ignore[attr-defined]
    trained = sum(batch.num_sequences for batch in batches)
    lines = [line for step, line in tracker.steps.items() if step]
    staleness = max(line["train/staleness_max"] for line in lines)
    tokens = sum(len(batch.target) for batch in batches)
    return Result(seconds, tokens, 1 - trained / sampled[0], staleness, tracker)


def test_one_slow_environment_in_ten_no_longer_holds_the_slots(tmp_path):
    """Its groups become too old to train on; cancelled then, they leave their slots to the others."""
    before, after = (
        run_world(
            World(slow_seconds=600.0), tmp_path / str(aborts), order=DropTooOld(), slots=2 * PER_STEP, steps=30, aborts=aborts
        )
        for aborts in (False, True)
    )
    assert after.staleness <= STALENESS and before.staleness <= STALENESS
    assert after.tokens / after.seconds > 5 * before.tokens / before.seconds


@pytest.mark.exhaustive
def test_a_sandbox_that_bears_few_rollouts_fails_fewer(tmp_path):
    """64 at once fill a sandbox for 12: without a limit most rollouts are thrown away, and with it few."""
    results = []
    for gates in ((), (AdaptiveConcurrency(16 * SAMPLES),)):
        order = Windowed(window=16, groups_per_step=PER_STEP, max_staleness=STALENESS)
        world = World(seconds=10.0, slow_seconds=10.0, bears=12)
        results.append(
            run_world(world, tmp_path / str(len(gates)), order=order, slots=3 * PER_STEP, steps=20, aborts=True, gates=gates)
        )
    before, after = results
    assert after.thrown_away < before.thrown_away / 3
    assert after.tokens / after.seconds > 0.8 * before.tokens / before.seconds


@settings(max_examples=5)
@given(st.integers(0, 10**6), st.sampled_from(["fifo", "windowed", "drop_too_old"]))
@pytest.mark.exhaustive
def test_no_group_is_trained_on_beyond_its_staleness_whatever_fails_waits_or_is_cancelled(tmp_path_factory, seed, kind):
    draw = random.Random(seed)
    orders: dict[str, GroupOrder] = {
        "fifo": Fifo(),
        "windowed": Windowed(window=draw.randint(1, 14), groups_per_step=PER_STEP, max_staleness=STALENESS),
        "drop_too_old": DropTooOld(),
    }
    world = World(
        seconds=draw.uniform(0.1, 5.0),
        slow_seconds=draw.uniform(5.0, 30.0),
        fails=draw.choice([0.0, 0.05, 0.2]),
        bears=draw.choice([6, 9, 10**9]),
        draw=draw,
    )
    gates = (AdaptiveConcurrency(draw.randint(1, 48)),) if draw.random() < 0.7 else ()
    result = run_world(
        world,
        tmp_path_factory.mktemp("run"),
        order=orders[kind],
        slots=draw.randint(PER_STEP, (STALENESS + 1) * PER_STEP),
        steps=6,
        aborts=draw.random() < 0.8,
        gates=gates,
    )
    assert result.staleness <= STALENESS
    assert not gates or (gates[0].running <= gates[0].most and gates[0].limit >= 1)
