"""The clock of an engine: the order of events is one of ticks, whatever time environments take."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.generation.base import Completion, Pacer
from strop.rollouts.order import DropTooOld, Fifo, GroupOrder, Windowed
from strop.rollouts.repeat.answer_times import AnswerId, AnswerTimes, AsTheyCome, FixedDelay, ReplayedTimes, ReplayEnded
from strop.rollouts.repeat.clock_state import ClockState
from strop.rollouts.repeat.engine_clock import ClockedGenerator, EngineClock
from strop.rollouts.repeat.event_log import EventFileError, EventLog, read_events
from strop.rollouts.stream import RolloutStream, StreamState
from strop.sampling import Sampling, mix_seed
from strop.types import Group, Rollout, Task
from support.sweep import sweep_rows

SAMPLES, TURNS = 3, 3


@dataclass
class StepEngine:
    """Takes one step for all its requests. What it samples depends on all that share a step, as rounding does, but much more."""

    slots: int = 4
    version: int = 0
    pacer: Pacer | None = None
    running: list[list[Any]] = field(default_factory=list)  # [seed, steps left, tokens, future]
    steps: list[tuple[int, ...]] = field(default_factory=list)  # the seeds of each step
    loop: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        return sum(not request[3].done() for request in self.running)

    @property
    def room(self) -> int:
        return self.slots - len(self.running)

    async def generate(self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "") -> Completion:
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.running.append([seed, 1 + seed % 4, [], done])
        if self.loop is None or self.loop.done():
            self.loop = asyncio.create_task(self._serve())
        return await done

    async def _serve(self) -> None:
        while self.running:
            await (asyncio.sleep(0) if self.pacer is None else self.pacer.pace(self._step))

    def _step(self) -> None:
        self.steps.append(tuple(request[0] for request in self.running))
        drawn = hash((self.version, self.steps[-1])) % 1000
        for request in list(self.running):
            request[1] -= 1
            request[2].append(drawn)
            if not request[1]:
                self.running.remove(request)
                tokens = torch.tensor(request[2])
                versions = torch.full((len(tokens),), self.version, dtype=torch.int32)
                request[3].set_result(
                    Completion(tokens=tokens, logprobs=-tokens.float(), versions=versions, text="", stopped=True)
                )

    async def close(self) -> None:
        pass


async def take_time(pace: random.Random) -> None:
    for _ in range(pace.choice([0, 0, 1, 3, 20])):
        await asyncio.sleep(0)
    if pace.random() < 0.1:
        await asyncio.sleep(0.002)


def make_stream(
    engine: StepEngine,
    clock: EngineClock,
    pace: random.Random,
    *,
    order: GroupOrder,
    slots: int,
    state: StreamState | None = None,
) -> RolloutStream:
    generator = ClockedGenerator(engine)

    async def episode(group: int, sample: int) -> Rollout:
        await take_time(pace)
        tokens: list[int] = []
        for turn in range(1 + mix_seed(group, sample) % TURNS):
            completion = await generator.generate([1], sampling=Sampling(), seed=mix_seed(group, sample, turn) % 10_000)
            tokens += [*completion.tokens.tolist(), *completion.versions.tolist()]
            await take_time(pace)
        return Rollout(task=Task(id=str(group)), sample=sample, seed=0, messages=(), prompt=torch.tensor(tokens))

    async def rank(rollouts: list[Rollout]) -> list[Rollout]:
        await take_time(pace)
        return rollouts

    async def run(index: int) -> Group:
        group = clock.group(index)
        rollouts = list(
            await asyncio.gather(*(group.episode(sample, partial(episode, index, sample)) for sample in range(SAMPLES)))
        )
        if index % 2:
            rollouts = await group.rewards(partial(rank, rollouts))
        return Group(index=index, environment="", version=group.version(generator), rollouts=tuple(rollouts))

    return RolloutStream(
        run, slots=slots, refill_on_release=True, order=order, version=lambda: engine.version, state=state, pace=clock
    )


Outcome = list[tuple[int, int, int, list[list[int]]]]  # step, group, version, tokens of the rollouts


def describe(step: int, group: Group) -> tuple[int, int, int, list[list[int]]]:
    return step, group.index, group.version, [rollout.prompt.tolist() for rollout in group.rollouts]


@dataclass
class Run:
    """A loop of steps of two groups. ``kill_at`` ends it after a step, and ``state`` is then what a checkpoint has."""

    times: AnswerTimes
    order: GroupOrder = field(default_factory=Fifo)
    drains: bool = False
    log: Callable[[], EventLog] = EventLog
    outcome: Outcome = field(default_factory=list)
    state: StreamState | None = None
    folder: Path | None = None  # of the clock in the checkpoint
    engine: StepEngine = field(default_factory=StepEngine)
    step: int = 0

    def play(self, pace: int, *, upto: int = 8, folder: Path | None = None) -> Run:
        asyncio.run(self._play(random.Random(pace), upto, folder))
        return self

    async def _play(self, pace: random.Random, upto: int, folder: Path | None) -> None:
        self.engine = StepEngine(version=self.step)
        clock, state = EngineClock(self.engine, self.times, self.log()), ClockState()
        if self.folder is not None:
            state.load(self.folder)
        state.start(clock)
        clock.publish(self.step)
        slots = 9 if self.order.drops_stale else 6
        stream = make_stream(self.engine, clock, pace, order=self.order, slots=slots, state=self.state)
        while self.step < upto:
            for _ in range(2):
                self.outcome.append(describe(self.step, await stream.next()))
            if self.drains:
                await stream.drain()
            await clock.finish_requests()
            self.step += 1
            self.engine.version = self.step
            clock.publish(self.step)
            stream.release(2)
            await take_time(pace)
        self.state = stream.state()
        if folder is not None:
            state.save(folder)
            self.folder = folder
        await stream.close()
        await clock.close()


ORDERS: dict[str, Callable[[], GroupOrder]] = {
    "fifo": Fifo,
    "windowed": lambda: Windowed(window=4, groups_per_step=2, max_staleness=2),
    "as they finish": DropTooOld,
}
each_order = pytest.mark.parametrize("order", list(ORDERS))


@pytest.mark.parametrize(
    ("order", "drains", "delay"),
    sweep_rows(
        product(ORDERS, [False, True], [0, 1, 5]),
        *(("fifo", False, 0), ("fifo", True, 5), ("windowed", False, 5), ("windowed", True, 1)),
        *(("as they finish", False, 1), ("as they finish", True, 0)),
    ),
)
def test_a_run_repeats_whatever_time_its_environments_take(order, drains, delay):
    runs = [Run(FixedDelay(delay), ORDERS[order](), drains).play(pace) for pace in range(4)]
    assert all(run.outcome == runs[0].outcome for run in runs)
    assert all(run.engine.steps == runs[0].engine.steps for run in runs)
    if not drains:
        assert any(step > version for step, _, version, _ in runs[0].outcome), (
            "groups are older than the step that trains on them"
        )


@pytest.mark.parametrize(
    ("order", "delay"),
    sweep_rows(product(ORDERS, [0, 1, 5]), ("fifo", 5), ("windowed", 1), ("as they finish", 0), ("windowed", 0)),
)
def test_stopped_at_a_step_and_resumed_a_run_goes_on_as_if_nothing_had_happened(tmp_path, order, delay):
    whole = Run(FixedDelay(delay), ORDERS[order]()).play(0)
    parts = Run(FixedDelay(delay), ORDERS[order]())
    for number, upto in enumerate((1, 3, 4, 8)):
        parts.play(number + 10, upto=upto, folder=tmp_path / str(upto))
        assert number == 3 or json.loads((tmp_path / str(upto) / "clock.json").read_text())["groups"], "groups were unfinished"
    assert parts.outcome == whole.outcome


def test_a_longer_delay_lets_the_engine_go_on_while_environments_work():
    steps = [len(Run(FixedDelay(delay)).play(0).engine.steps) for delay in (0, 20)]
    assert steps[1] >= steps[0], "batches are smaller, and there are more of them"


@each_order
def test_a_run_whose_answers_count_as_they_come_is_replayed_from_its_record(tmp_path, order):
    different = set()
    for pace in range(5):
        path = tmp_path / f"{pace}.jsonl"
        recorded = Run(AsTheyCome(), ORDERS[order](), log=lambda path=path: EventLog(path)).play(pace)
        different.add(str(recorded.engine.steps))
        events = read_events(path)
        replayed = Run(events.times, ORDERS[order](), log=lambda events=events: EventLog(recorded=events)).play(pace + 50)
        assert replayed.outcome == recorded.outcome and replayed.engine.steps == recorded.engine.steps
    assert len(different) > 1, "unlike each other"


def test_a_recorded_run_that_was_resumed_is_replayed_whole(tmp_path):
    path = tmp_path / "events.jsonl"
    recorded = Run(AsTheyCome(), log=lambda: EventLog(path))
    for upto in (2, 5, 8):
        recorded.play(upto, upto=upto, folder=tmp_path / str(upto))
        path.write_text(path.read_text() + '{"tick": 1, "event": "answer", "gro')  # what a killed run writes after its checkpoint
    events = read_events(path)
    assert Run(events.times).play(77).outcome == recorded.outcome


def test_a_replay_that_is_longer_than_its_record_ends(tmp_path):
    path = tmp_path / "events.jsonl"
    Run(AsTheyCome(), log=lambda: EventLog(path)).play(0, upto=3)
    with pytest.raises(ReplayEnded, match="with no more steps than it had"):
        Run(read_events(path).times).play(0, upto=5)


def test_a_replay_of_another_run_ends():
    with pytest.raises(ReplayEnded, match="the two runs differ in more than the order of their events"):
        Run(ReplayedTimes({AnswerId(0, sample, turn): 1 for sample in range(SAMPLES) for turn in range(2)}, "it")).play(0)


def test_a_replay_that_publishes_at_another_tick_ends(tmp_path):
    path = tmp_path / "events.jsonl"
    recorded = EventLog(path)
    recorded.start()
    recorded.answer(2, AnswerId(0, 0, 0))
    recorded.publish(3, version=1)
    recorded.close()
    log = EventLog(recorded=read_events(path))
    log.publish(3, version=1)
    with pytest.raises(ReplayEnded, match="version 1 is published at tick 4, and at tick 3 in"):
        log.publish(4, version=1)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no events"),
        ('{"tick": 1, "event": "publish", "version": 1}\n', "holds no events"),
        ("tick\n", "line 1 of .* is no event"),
        ('{"tick": 1, "event": "answer"}\n', "line 1 of .* is no event"),
    ],
)
def test_a_file_that_holds_no_events_is_refused(tmp_path, text, message):
    with pytest.raises(EventFileError, match=message):
        read_events(write(tmp_path / "events.jsonl", text))


def test_a_record_that_lost_its_beginning_is_not_continued(tmp_path):
    with pytest.raises(EventFileError, match="the beginning of the record is lost"):
        EventLog(tmp_path / "events.jsonl").start(100)


def test_a_rollout_that_asks_twice_at_the_same_time_fails_with_the_reason():
    async def play() -> None:
        engine = StepEngine()
        clock = EngineClock(engine, FixedDelay())
        generator = ClockedGenerator(engine)

        async def twice() -> None:
            ask = [generator.generate([1], sampling=Sampling(), seed=seed) for seed in (1, 2)]
            await asyncio.gather(*ask)

        async def group() -> None:
            await clock.begin_group(0).episode(0, twice)

        await clock.drive(group())

    with pytest.raises(RuntimeError, match="asks the policy twice at the same time"):
        asyncio.run(play())


def test_requests_beside_the_clock_are_served_at_once():
    async def play() -> Completion:
        engine = StepEngine()
        EngineClock(engine, FixedDelay()).attach()
        return await ClockedGenerator(engine).generate([1], sampling=Sampling(), seed=3)

    assert len(asyncio.run(play()).tokens) == 4


def test_what_waits_on_a_clock_of_its_own_repeats_and_gives_the_engine_back():
    async def play(pace: random.Random) -> tuple[list[Group], list[Any], bool]:
        engine = StepEngine()
        training = EngineClock(engine, FixedDelay())
        training.attach()
        clock = EngineClock(engine, FixedDelay())
        generator = ClockedGenerator(engine)

        async def episode(index: int) -> list[int]:
            await take_time(pace)
            completion = await generator.generate([1], sampling=Sampling(), seed=index)
            await take_time(pace)
            return completion.tokens.tolist()

        async def group(index: int) -> list[int]:
            tokens = await clock.begin_group(index).episode(0, partial(episode, index))
            clock.end(index)
            await take_time(pace)  # its grades
            return tokens

        tokens = await clock.drive(asyncio.gather(*(group(index) for index in range(9))))
        return tokens, engine.steps, engine.pacer is training

    played = [asyncio.run(play(random.Random(pace))) for pace in range(4)]
    assert all(each == played[0] for each in played) and played[0][2]
