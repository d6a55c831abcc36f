"""Where training data comes from: groups of rollouts, begun ahead by at most a number of slots.

    slots = (max_staleness + 1) x groups per step

A slot is taken when a group's task is begun and given back when the group is dropped, or when the weights trained on it have been
published. So when a group is begun, at most ``slots`` groups before it are not yet published: handed out in the order in which they were
begun, each is trained on by a policy at most ``max_staleness`` steps newer than the one that began it. Other orders
(``strop.rollouts.order``) keep that bound by their own means.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from strop.rollouts.order import Fifo, Held, Order
from strop.types import Group

RunGroup = Callable[[int], Awaitable[Group]]


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """What a run needs to continue its stream: finished groups, and the tasks to begin again."""

    next_index: int  # the first task never begun
    unfinished: tuple[int, ...]  # begun, not finished: they are begun again, with the same seeds
    finished: tuple[Group, ...]  # finished, not trained on


def renewed(
    state: StreamState, *, step: int, groups_per_step: int, max_staleness: int, order: Order | None = None
) -> StreamState:
    """The state with those finished groups begun again that would be too old when their turn comes.

    There are none unless settings changed between two starts of the run. An order that drops old groups needs no such care.
    """
    order = order or Fifo()
    if order.drops:
        return state
    held = [Held(index, step, None) for index in state.unfinished]
    held += [Held(group.index, group.version, place) for place, group in enumerate(state.finished)]
    turn = {group.index: step + place // groups_per_step for place, group in enumerate(order.queue(held))}
    fresh = tuple(group for group in state.finished if turn[group.index] - group.version <= max_staleness)
    again = tuple(sorted({*turn} - {group.index for group in fresh}))
    return StreamState(next_index=state.next_index, unfinished=again, finished=fresh)


class EndOfTasks(Exception):
    """The tasks of every epoch have been used."""


class GroupStream(Protocol):
    """The seam of the loop to its data: rollouts as they are sampled, or recorded ones."""

    async def next(self) -> Group:
        """The next group by the stream's order. Raises EndOfTasks."""
        ...

    def release(self, count: int) -> None:
        """Give back the slots of ``count`` groups: they were dropped, or the weights trained on them are published."""
        ...

    async def drained(self) -> None:
        """Returns when no group is running."""
        ...

    def state(self) -> StreamState: ...

    async def close(self) -> None: ...


class RolloutStream:
    """Begins groups as slots allow and hands them out by an order."""

    def __init__(
        self,
        run_group: RunGroup,
        *,
        slots: int,
        size: int | None = None,
        state: StreamState | None = None,
        ahead: bool = False,
        order: Order | None = None,
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        """``run_group(index)`` runs the index-th task of the stream; ``size`` is how many there are, None for no end.

        ``ahead``: a freed slot is filled at once (asynchronous training). Otherwise groups are begun when the next one is asked for, so
        that nothing runs while a synchronous run evaluates or saves. ``order`` is FIFO if it is None; ``version()`` is that of the weights
        that the generators hold, which an order may judge age by.
        """
        self._run_group = run_group
        self._free = slots
        self._size = size
        self._ahead = ahead
        self._order = order or Fifo()
        self._version = version
        self._next = state.next_index if state else 0
        self._again = deque(state.unfinished if state else ())
        self._running: dict[int, asyncio.Task[Group]] = {}  # and those that finished in this process
        self._restored = {group.index: group for group in state.finished} if state else {}
        self._held = {index: Held(index, group.version, place) for place, (index, group) in enumerate(self._restored.items())}
        self._finished = len(self._held)
        self._one_finished = asyncio.Event()
        self._free -= len(self._held)
        self._taken = 0  # handed out, slot not given back

    @property
    def _more(self) -> bool:
        """Whether there is a task to begin."""
        return bool(self._again) or self._size is None or self._next < self._size

    def _fill(self) -> None:
        """Begin a task in every free slot."""
        while self._free > 0 and self._more:
            if self._again:
                index = self._again.popleft()
            else:
                index, self._next = self._next, self._next + 1
            self._held[index] = Held(index, self._version(), None)
            self._running[index] = asyncio.ensure_future(self._run_group(index))
            self._running[index].add_done_callback(partial(self._note_finished, index))
            self._free -= 1

    def _note_finished(self, index: int, task: asyncio.Task[Group]) -> None:
        if index in self._held:
            self._held[index] = replace(self._held[index], finished=self._finished)
            self._finished += 1
            self._one_finished.set()

    async def next(self) -> Group:
        """The next group by the order; waits for one to finish where it must. Raises EndOfTasks."""
        self._fill()
        if not self._held:
            if self._more:
                raise RuntimeError("every slot is held by groups that were handed out; release some before asking for the next")
            raise EndOfTasks
        index = await self._choose()
        group = self._restored.pop(index) if index in self._restored else await self._running[index]
        self._running.pop(index, None)
        del self._held[index]
        self._taken += 1
        return group

    async def _choose(self) -> int:
        """The index of the group to hand out, as soon as there is one."""
        while True:
            held = [self._held[index] for index in sorted(self._held)]
            chosen = self._order.choose(held, now=self._version(), taken=self._taken)
            if chosen is not None:
                return chosen.index
            if all(group.finished is not None for group in held):
                raise RuntimeError(f"{type(self._order).__name__} hands out none of {len(held)} groups, though all are finished")
            self._one_finished.clear()
            await self._one_finished.wait()

    def release(self, count: int) -> None:
        """Give back the slots of ``count`` groups: they were dropped, or the weights trained on them are published."""
        self._free += count
        self._taken -= count
        if self._ahead:
            self._fill()

    async def drained(self) -> None:
        """Returns when no group is running. What finished meanwhile is kept, an exception too: it is raised when its turn comes."""
        while running := [task for task in self._running.values() if not task.done()]:
            await asyncio.wait(running)

    def state(self) -> StreamState:
        """The stream as it could be continued by another process: finished groups in the order in which they finished."""
        done = {
            index: task.result()
            for index, task in self._running.items()
            if task.done() and not task.cancelled() and task.exception() is None
        }
        finished = sorted({**self._restored, **done}.values(), key=self._place)
        unfinished = tuple(sorted([index for index in self._running if index not in done] + list(self._again)))
        return StreamState(next_index=self._next, unfinished=unfinished, finished=tuple(finished))

    def _place(self, group: Group) -> tuple[int, int]:
        finished = self._held[group.index].finished
        return (self._finished if finished is None else finished, group.index)

    async def close(self) -> None:
        """Stop whatever runs."""
        tasks = list(self._running.values())
        self._running.clear()
        self._held.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
