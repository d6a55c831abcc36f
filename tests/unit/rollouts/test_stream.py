"""Slots and staleness, under random latencies on a virtual clock."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from loop.fakes import run_virtually
from strop.rollouts.stream import DropTooOld, EndOfTasks, Fifo, RolloutStream, StreamState, Windowed, requeue_stale
from strop.types import Group, Rollout, Task


def group_of(index: int, version: int) -> Group:
    rollout = Rollout(task=Task(id=str(index)), sample=0, seed=0, messages=(), prompt=torch.zeros(1, dtype=torch.int64))
    return Group(index=index, environment="e", version=version, rollouts=(rollout,))


@dataclass
class World:
    """Runs groups with random latencies and counts who holds a slot."""

    slots: int
    draw: random.Random
    version: int = 0
    begun: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    released: int = 0
    restored: int = 0  # slots that groups of an earlier process hold
    most: int = 0

    async def run_group(self, index: int) -> Group:
        version = self.version
        self.begun.append(index)
        held = self.restored + len(self.begun) - self.released
        self.most = max(self.most, held)
        assert held <= self.slots, f"{held} groups hold {self.slots} slots"
        try:
            await asyncio.sleep(self.draw.expovariate(1.0))
        except asyncio.CancelledError:
            self.cancelled.append(index)
            raise
        self.finished.append(index)
        return group_of(index, version)

    def release(self, stream: RolloutStream, count: int) -> None:
        self.released += count  # before the stream fills the slots
        stream.release(count)


async def train(
    world: World, stream: RolloutStream, *, steps: int, per_step: int, k: int, drop: float
) -> tuple[list[int], list[int]]:
    """What the loop does with a stream; returns the indices handed out and the staleness of each group trained on."""
    handed, staleness = [], []
    for _ in range(steps):
        kept = 0
        while kept < per_step:
            group = await stream.next()
            handed.append(group.index)
            if world.draw.random() < drop:
                world.release(stream, 1)
            else:
                kept += 1
                staleness.append(world.version - group.version)
        await asyncio.sleep(world.draw.uniform(0, 2))
        world.version += 1
        world.release(stream, per_step)
        await asyncio.sleep(world.draw.uniform(0, 2))  # validation: asynchronous groups go on meanwhile
    assert max(staleness) <= k
    return handed, staleness


@pytest.mark.parametrize("k", [0, 1, 4])
def test_no_schedule_exceeds_the_slots_or_the_staleness_and_groups_come_in_order(k):
    observed: Counter[int] = Counter()
    for seed in range(200):
        draw = random.Random(seed)
        per_step, drop = draw.randint(1, 4), draw.choice([0.0, 0.3, 0.6])
        world = World(slots=(k + 1) * per_step, draw=draw)

        async def play(world=world, per_step=per_step, drop=drop):
            stream = RolloutStream(world.run_group, slots=world.slots, refill_on_release=k > 0)
            handed, staleness = await train(world, stream, steps=8, per_step=per_step, k=k, drop=drop)
            await stream.close()
            return handed, staleness

        handed, staleness = run_virtually(play())
        assert handed == list(range(len(handed)))
        assert world.most == world.slots, "every slot is used"
        observed.update(staleness)
    assert max(observed) == k, "the bound is reached, so it is the bound that is tested"


def test_a_synchronous_stream_begins_nothing_before_it_is_asked():
    world = World(slots=3, draw=random.Random(0))

    async def play():
        stream = RolloutStream(world.run_group, slots=3)
        for _ in range(3):
            await stream.next()
        world.release(stream, 3)
        await asyncio.sleep(100)
        return list(world.begun)

    assert run_virtually(play()) == [0, 1, 2]


def test_an_asynchronous_stream_fills_a_slot_the_moment_it_is_free():
    world = World(slots=6, draw=random.Random(0))

    async def play():
        stream = RolloutStream(world.run_group, slots=6, refill_on_release=True)
        for _ in range(3):
            await stream.next()
        world.release(stream, 3)
        await asyncio.sleep(0)
        begun = list(world.begun)
        await stream.close()
        return begun

    assert run_virtually(play()) == list(range(9))


def test_asking_while_every_slot_is_held_is_an_error_and_not_the_end_of_the_tasks():
    world = World(slots=2, draw=random.Random(0))

    async def play():
        stream = RolloutStream(world.run_group, slots=2, size=10)
        await stream.next()
        await stream.next()
        with pytest.raises(RuntimeError, match="every slot is held"):
            await stream.next()

    run_virtually(play())


@pytest.mark.parametrize("ahead", [False, True])
def test_the_tasks_end_after_the_last_one(ahead):
    world = World(slots=6, draw=random.Random(1))

    async def play():
        stream = RolloutStream(world.run_group, slots=6, size=8, refill_on_release=ahead)
        indices = []
        for _ in range(8):
            indices.append((await stream.next()).index)
            world.release(stream, 1)
        for _ in range(2):
            with pytest.raises(EndOfTasks):
                await stream.next()
        return indices

    assert run_virtually(play()) == list(range(8))


@pytest.mark.parametrize("k", [0, 1, 4])
def test_a_restored_stream_hands_out_every_group_once_and_runs_no_finished_one_again(k):
    kept_finished = 0
    for seed in range(100):
        draw = random.Random(seed)
        per_step = draw.randint(1, 3)
        slots = (k + 1) * per_step

        async def play(draw=draw, per_step=per_step, slots=slots):
            first = World(slots=slots, draw=draw)
            stream = RolloutStream(first.run_group, slots=slots, refill_on_release=k > 0)
            before, _ = await train(first, stream, steps=3, per_step=per_step, k=k, drop=0.3)
            state = stream.state()
            await stream.close()

            second = World(slots=slots, draw=draw, version=first.version, restored=len(state.finished))
            resumed = RolloutStream(second.run_group, slots=slots, refill_on_release=k > 0, state=state)
            assert resumed.state() == state
            after, _ = await train(second, resumed, steps=4, per_step=per_step, k=k, drop=0.3)
            await resumed.close()
            assert not {group.index for group in state.finished} & {*second.begun}
            assert second.begun[: len(state.unfinished)] == list(state.unfinished)
            return before + after, len(state.finished)

        handed, finished = run_virtually(play())
        assert handed == list(range(len(handed)))
        kept_finished += finished
    assert (kept_finished > 0) == (k > 0), "an asynchronous stream had groups ready, a synchronous one never"


def test_closing_cancels_what_runs():
    cancelled = []

    async def slower_and_slower(index: int) -> Group:
        try:
            await asyncio.sleep(index)
        except asyncio.CancelledError:
            cancelled.append(index)
            raise
        return group_of(index, 0)

    async def play():
        stream = RolloutStream(slower_and_slower, slots=4, refill_on_release=True)
        await stream.next()
        await stream.next()
        await stream.close()

    run_virtually(play())
    assert cancelled == [2, 3]


def test_a_group_that_raises_is_raised_to_the_loop_and_begun_again_after_a_restart():
    async def fail(index: int) -> Group:
        await asyncio.sleep(1)
        if index == 1:
            raise KeyError("a table")
        return group_of(index, 0)

    async def play():
        stream = RolloutStream(fail, slots=3)
        await stream.next()
        with pytest.raises(KeyError, match="a table"):
            await stream.next()
        state = stream.state()
        await stream.close()
        return state

    state = run_virtually(play())
    assert state.unfinished == (1,)
    assert [group.index for group in state.finished] == [2]


def test_a_resume_with_less_staleness_begins_the_groups_again_that_would_be_too_old():
    finished = tuple(group_of(index, version) for index, version in [(4, 1), (5, 2), (7, 2)])
    state = StreamState(next_index=8, unfinished=(6,), finished=finished)
    fresh = requeue_stale(state, step=2, groups_per_step=2, max_staleness=0)
    assert fresh.unfinished == (4, 6, 7) and [group.index for group in fresh.finished] == [5]
    assert fresh.next_index == 8
    stream = RolloutStream(World(slots=2, draw=random.Random(0)).run_group, slots=2, state=fresh)
    assert stream.state() == fresh


def test_a_stream_is_drained_when_nothing_runs_and_keeps_what_finished_meanwhile():
    world = World(slots=6, draw=random.Random(3))

    async def play():
        stream = RolloutStream(world.run_group, slots=6, refill_on_release=True)
        await stream.next()
        assert len(world.finished) < 6
        await stream.drain()
        await stream.drain()
        assert sorted(world.finished) == list(range(6)), "and nothing new was begun"
        return [(await stream.next()).index for _ in range(5)], [group.index for group in stream.state().finished]

    assert run_virtually(play()) == ([1, 2, 3, 4, 5], [])


def test_draining_leaves_an_exception_to_the_turn_of_its_group():
    async def fail(index: int) -> Group:
        await asyncio.sleep(1)
        if index == 1:
            raise KeyError("a table")
        return group_of(index, 0)

    async def play():
        stream = RolloutStream(fail, slots=3, refill_on_release=True)
        await stream.next()
        await stream.drain()
        with pytest.raises(KeyError, match="a table"):
            await stream.next()
        await stream.close()

    run_virtually(play())


def test_the_state_has_finished_groups_in_the_order_in_which_they_finished():
    async def backwards(index: int) -> Group:
        await asyncio.sleep(10 - index)
        return group_of(index, 0)

    async def play():
        stream = RolloutStream(backwards, slots=4, refill_on_release=True, order=DropTooOld())
        first = await stream.next()
        await asyncio.sleep(1.5)
        state = stream.state()
        await stream.close()
        resumed = RolloutStream(backwards, slots=4, refill_on_release=True, order=DropTooOld(), state=state)
        again = [(await resumed.next()).index for _ in range(2)]
        await resumed.close()
        return first.index, [group.index for group in state.finished], state.unfinished, again

    first, finished, unfinished, again = run_virtually(play())
    assert (first, finished, unfinished) == (3, [2], (0, 1))
    assert again[0] == 2


def test_an_order_that_never_chooses_is_an_error_and_not_a_hang():
    class Undecided(Fifo):
        def choose(self, held, *, now, taken):
            return None

    async def play():
        stream = RolloutStream(World(slots=2, draw=random.Random(0)).run_group, slots=2, order=Undecided())
        with pytest.raises(RuntimeError, match="Undecided chose none of 2 groups, although all are finished"):
            await stream.next()

    run_virtually(play())


def test_many_slots_cost_little():
    async def at_once(index: int) -> Group:
        return group_of(index, version)

    version, per_step = 0, 512

    async def play():
        nonlocal version
        order = Windowed(window=per_step, groups_per_step=per_step, max_staleness=3)
        stream = RolloutStream(at_once, slots=3 * per_step, refill_on_release=True, order=order, version=lambda: version)
        for _ in range(2):
            for _ in range(per_step):
                await stream.next()
            version += 1
            stream.release(per_step)
        await stream.close()

    started = time.perf_counter()
    run_virtually(play())
    assert time.perf_counter() - started < 8, "some milliseconds a group, on a busy machine"
