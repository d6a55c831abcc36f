"""Which group is next: the bound on staleness, proven against schedules that are written out."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loop.fakes import run_virtually
from strop.rollouts.stream import (
    DropTooOld,
    EndOfTasks,
    Fifo,
    GroupOrder,
    PendingGroup,
    RolloutStream,
    StreamState,
    Windowed,
    requeue_stale,
)
from strop.types import Group, Rollout, Task
from support.sweep import sweep


def held(*groups: tuple[int, int, int | None]) -> list[PendingGroup]:
    return [PendingGroup(*group) for group in groups]


def chosen(order: GroupOrder, groups: Sequence[PendingGroup], *, now: int = 0, taken: int = 0) -> int | None:
    found = order.choose(groups, now=now, taken=taken)
    return None if found is None else found.index


# --- one choice -----------------------------------------------------------------------------------------------------------


def test_fifo_waits_for_the_first():
    assert chosen(Fifo(), held((3, 0, None), (4, 0, 0))) is None
    assert chosen(Fifo(), held((3, 0, 1), (4, 0, 0))) == 3


def test_drop_too_old_takes_what_finished_first_however_old():
    groups = held((3, 0, 7), (4, 1, 2), (5, 5, None))
    assert chosen(DropTooOld(), groups, now=9) == 4
    assert chosen(DropTooOld(), groups[2:], now=9) is None


def test_a_window_lets_a_finished_group_overtake_the_oldest_and_no_further():
    groups = held((0, 0, None), (1, 0, None), (2, 0, 0))
    assert chosen(Windowed(window=3, groups_per_step=2, max_staleness=1), groups) == 2
    assert chosen(Windowed(window=2, groups_per_step=2, max_staleness=1), groups) is None


def test_a_group_is_not_overtaken_where_it_would_miss_its_deadline():
    windowed = Windowed(window=9, groups_per_step=2, max_staleness=1)
    groups = held((0, 0, None), (1, 0, None), (2, 1, 0))
    assert chosen(windowed, groups, now=0) == 2, "two steps are left for the two old ones"
    assert chosen(windowed, groups, now=1) is None, "this step's two places are theirs"
    assert chosen(windowed, groups[1:], now=1) == 2, "the other place is free"
    assert chosen(windowed, groups[1:], now=1, taken=1) is None


def test_a_window_of_one_is_fifo():
    draw = random.Random(0)
    for _ in range(500):
        groups = [PendingGroup(index, index // 3, draw.choice([None, index])) for index in range(draw.randint(1, 9))]
        assert chosen(Windowed(window=1, groups_per_step=3, max_staleness=2), groups) == chosen(Fifo(), groups)


def can_all_be_trained(versions: Sequence[int], *, now: int, taken: int, per_step: int, k: int) -> bool:
    """Written out: the earliest deadlines first, step after step."""
    places = (now + (taken + place) // per_step for place in range(len(versions)))
    return all(step <= version + k for step, version in zip(places, sorted(versions), strict=True))


@st.composite
def moments(draw: st.DrawFn) -> tuple[Windowed, list[PendingGroup], int, int]:
    """A moment in which every deadline can still be met."""
    per_step, k, now = draw(st.integers(1, 4)), draw(st.integers(0, 4)), draw(st.integers(0, 5))
    taken = draw(st.integers(0, per_step - 1))
    wanted = draw(st.lists(st.integers(max(0, now - k), now), min_size=1, max_size=(k + 1) * per_step - taken))
    versions: list[int] = []
    for version in sorted(wanted):
        if can_all_be_trained([*versions, version], now=now, taken=taken, per_step=per_step, k=k):
            versions.append(version)
    versions = versions or [now]
    indices = draw(st.permutations(range(len(versions))))
    finished = draw(st.lists(st.one_of(st.none(), st.integers(0, 99)), min_size=len(versions), max_size=len(versions)))
    groups = [PendingGroup(index, versions[index], finished[index]) for index in sorted(indices)]
    window = draw(st.integers(1, len(groups) + 1))
    return Windowed(window=window, groups_per_step=per_step, max_staleness=k), groups, now, taken


@pytest.mark.parametrize("count", sweep([200, 1000], 200))
def test_a_window_hands_out_the_oldest_group_that_leaves_every_deadline_feasible(count):
    settings(max_examples=count, deadline=None)(given(moments())(assert_the_oldest_feasible_group_is_chosen))()


def assert_the_oldest_feasible_group_is_chosen(moment):
    windowed, groups, now, taken = moment
    oldest = sorted(groups, key=lambda group: (group.version, group.index))[: windowed.window]

    def feasible(gone: PendingGroup) -> bool:
        rest = [group.version for group in groups if group is not gone]
        return can_all_be_trained(rest, now=now, taken=taken + 1, per_step=windowed.groups_per_step, k=windowed.max_staleness)

    allowed = [group for group in oldest if group.finish_rank is not None and feasible(group)]
    assert windowed.choose(groups, now=now, taken=taken) is (allowed[0] if allowed else None)
    assert feasible(oldest[0]), "the oldest may always go: nothing is stuck"


# --- whole schedules --------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """Groups that take random times, now and then very long; some fail. ``version`` is what generators hold."""

    draw: random.Random
    version: int = 0
    begun: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    running: int = 0

    async def run_group(self, index: int) -> Group:
        version = self.version
        self.begun.append(index)
        self.running += 1
        try:
            for _ in range(self.draw.randint(1, 3)):  # turns
                await asyncio.sleep(self.draw.choice([0.0, self.draw.expovariate(1.0), self.draw.paretovariate(1.1)]))
        finally:
            self.running -= 1
        self.finished.append(index)
        error = "broken" if self.draw.random() < 0.1 else None
        rollout = Rollout(
            task=Task(id=str(index)), sample=0, seed=0, messages=(), prompt=torch.zeros(1, dtype=torch.int64), error=error
        )
        return Group(index=index, environment="e", version=version, rollouts=(rollout,))


@dataclass
class Schedule:
    """One run of a stream as the loop uses it, with everything random."""

    seed: int
    kind: str

    def __post_init__(self) -> None:
        self.draw = draw = random.Random(self.seed)
        self.per_step, self.k = draw.randint(1, 4), draw.randint(1, 4)
        self.filtered = draw.choice([0.0, 0.2, 0.6])
        self.drains = draw.random() < 0.4
        self.size = draw.choice([None, draw.randint(1, 30)])
        self.training = draw.choice([0.1, 1.0, 5.0])
        slots = (self.k + 1) * self.per_step
        self.slots = draw.randint(self.per_step, 2 * slots if self.kind == "drop_too_old" else slots)
        window = draw.randint(1, slots + 2)
        self.order: GroupOrder = {
            "fifo": Fifo(),
            "windowed": Windowed(window=window, groups_per_step=self.per_step, max_staleness=self.k),
            "drop_too_old": DropTooOld(),
        }[self.kind]
        self.trained: list[int] = []
        self.dropped: Counter[str] = Counter()
        self.gone: list[int] = []  # dropped
        self.staleness: list[int] = []

    def stream(self, world: World, state: StreamState | None) -> RolloutStream:
        return RolloutStream(
            world.run_group,
            slots=self.slots,
            size=self.size,
            state=state,
            refill_on_release=True,
            order=self.order,
            version=lambda: world.version,
        )

    async def steps(self, world: World, stream: RolloutStream, count: int) -> bool:
        """What the loop does; False at the end of the tasks."""
        for _ in range(count):
            step: list[int] = []
            while len(step) < self.per_step:
                try:
                    group = await stream.next()
                except EndOfTasks:
                    return False
                age = world.version - group.version
                why = "error" if group.errors else "stale" if self.order.drops_stale and age > self.k else None
                why = why or ("filtered" if self.draw.random() < self.filtered else None)
                if why:
                    self.dropped[why] += 1
                    self.gone.append(group.index)
                    stream.release(1)
                else:
                    step.append(group.index)
                    self.staleness.append(age)
            await asyncio.sleep(self.draw.expovariate(1 / self.training))
            if self.drains:
                await stream.drain()
                assert world.running == 0
            world.version += 1
            self.trained += step
            stream.release(self.per_step)
            if self.draw.random() < 0.3:
                await asyncio.sleep(self.draw.uniform(0, 2))  # validation
        return True

    async def play(self) -> StreamState:
        """Some steps, a kill, a resume from the last state, and more steps."""
        world = World(self.draw)
        stream = self.stream(world, None)
        going = await self.steps(world, stream, self.draw.randint(1, 5))
        state: StreamState = stream.state()
        await stream.close()
        if not going:
            return state
        saved = pickle.loads(pickle.dumps((world.version, state)))
        assert renewed_indices(self, saved[1], saved[0]) == ([group.index for group in saved[1].finished], saved[1].unfinished)
        world = World(self.draw, version=saved[0])
        stream = self.stream(world, saved[1])
        going = await self.steps(world, stream, self.draw.randint(1, 6))
        assert not {group.index for group in saved[1].finished} & {*world.begun}, "a finished group ran again"
        state = stream.state()
        await stream.close()
        return state


def renewed_indices(schedule: Schedule, state: StreamState, step: int) -> tuple[list[int], tuple[int, ...]]:
    fresh = requeue_stale(state, step=step, groups_per_step=schedule.per_step, max_staleness=schedule.k, order=schedule.order)
    return [group.index for group in fresh.finished], fresh.unfinished


@pytest.mark.parametrize("count", sweep([100, 1000], 100))
@pytest.mark.parametrize("kind", ["fifo", "windowed", "drop_too_old"])
def test_no_schedule_trains_on_what_is_too_old_or_loses_a_group_or_waits_forever(kind, count):
    """Many of them, with failures, filters, ends of tasks, long tails, and a kill in the middle; a deadlock raises at once."""
    reached, dropped = 0, Counter[str]()
    for seed in range(count):
        schedule = Schedule(seed, kind)
        state = run_virtually(asyncio.wait_for(schedule.play(), 1e6))
        assert max(schedule.staleness, default=0) <= schedule.k, f"seed {seed}"
        buffered = [group.index for group in state.finished]
        seen = [*schedule.trained, *schedule.gone, *buffered, *state.unfinished]
        assert len(seen) == len(set(seen)), f"seed {seed}: a group came twice"
        if schedule.size is None:
            assert sorted(seen) == list(range(state.next_index)), f"seed {seed}: a group is lost"
        reached += max(schedule.staleness, default=0) == schedule.k
        dropped += schedule.dropped
    assert reached > count / 10, "the bound is reached, so it is the bound that is tested"
    assert (dropped["stale"] > 0) == (kind == "drop_too_old")
    assert dropped["error"] and dropped["filtered"]


def steps_in(order: GroupOrder, *, slots: int, per_step: int, training: float, until: float) -> int:
    """How many steps a run makes by a time, where every seventh group takes very long."""

    async def run_group(index: int) -> Group:
        version = state["version"]
        await asyncio.sleep(9.0 if index % 7 == 0 else 1.0)
        rollout = Rollout(task=Task(id=""), sample=0, seed=0, messages=(), prompt=torch.zeros(1, dtype=torch.int64))
        return Group(index=index, environment="e", version=version, rollouts=(rollout,))

    state: dict[str, Any] = {"version": 0}

    async def play() -> None:
        stream = RolloutStream(run_group, slots=slots, refill_on_release=True, order=order, version=lambda: state["version"])
        while True:
            kept = 0
            while kept < per_step:
                group = await stream.next()
                if order.drops_stale and state["version"] - group.version > 3:
                    stream.release(1)
                else:
                    kept += 1
            await asyncio.sleep(training)
            state["version"] += 1
            stream.release(per_step)

    with pytest.raises(TimeoutError):
        run_virtually(asyncio.wait_for(play(), until))
    return int(state["version"])


def test_each_order_waits_less_for_slow_groups_than_the_one_before():
    options: dict[str, Any] = {"slots": 12, "per_step": 4, "training": 1.0, "until": 400.0}
    fifo = steps_in(Fifo(), **options)
    windowed = steps_in(Windowed(window=12, groups_per_step=4, max_staleness=3), **options)
    dropping = steps_in(DropTooOld(), **options)
    assert 1.1 * fifo < windowed < dropping
