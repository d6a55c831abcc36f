"""Where training data comes from: groups of rollouts, begun ahead by at most a number of slots.

    slots = (max_staleness + 1) x groups per step

A slot is taken when a group's task is begun and given back when the group is dropped, or when the weights trained on it have been
published. So when a group is begun, at most ``slots`` groups before it are not yet published: it is trained on by a policy at most
``max_staleness`` steps newer than the one that began it. Groups come out in the order in which they were begun (FIFO): the bound needs
it, and a run can be repeated.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from strop.types import Group

RunGroup = Callable[[int], Awaitable[Group]]


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """What a run needs to continue its stream: finished groups, and the tasks to begin again."""

    next_index: int  # the first task never begun
    unfinished: tuple[int, ...]  # begun, not finished: they are begun again, with the same seeds
    finished: tuple[Group, ...]  # finished, not trained on


def renewed(state: StreamState, *, step: int, groups_per_step: int, max_staleness: int) -> StreamState:
    """The state with those finished groups begun again that would be too old when their turn comes.

    There are none unless settings changed between two starts of the run.
    """
    order = sorted([*state.unfinished, *(group.index for group in state.finished)])
    turn = {index: step + place // groups_per_step for place, index in enumerate(order)}
    fresh = tuple(group for group in state.finished if turn[group.index] - group.version <= max_staleness)
    again = tuple(sorted({*order} - {group.index for group in fresh}))
    return StreamState(next_index=state.next_index, unfinished=again, finished=fresh)


class EndOfTasks(Exception):
    """The tasks of every epoch have been used."""


class GroupStream(Protocol):
    """The seam of the loop to its data: rollouts as they are sampled, or recorded ones."""

    async def next(self) -> Group:
        """The next group in order. Raises EndOfTasks."""
        ...

    def release(self, count: int) -> None:
        """Give back the slots of ``count`` groups: they were dropped, or the weights trained on them are published."""
        ...

    def state(self) -> StreamState: ...

    async def close(self) -> None: ...


class RolloutStream:
    """Begins groups as slots allow and hands them out in order."""

    def __init__(
        self, run_group: RunGroup, *, slots: int, size: int | None = None, state: StreamState | None = None, ahead: bool = False
    ) -> None:
        """``run_group(index)`` runs the index-th task of the stream; ``size`` is how many there are, None for no end.

        ``ahead``: a freed slot is filled at once (asynchronous training). Otherwise groups are begun when the next one is asked for, so
        that nothing runs while a synchronous run evaluates or saves.
        """
        self._ahead = ahead
        self._run_group = run_group
        self._free = slots
        self._size = size
        self._next = state.next_index if state else 0
        self._again = deque(state.unfinished if state else ())
        self._pending: dict[int, asyncio.Task[Group]] = {}
        self._restored = {group.index: group for group in state.finished} if state else {}
        self._order: deque[int] = deque(sorted(self._restored))  # indices that hold a slot and were not handed out
        self._free -= len(self._restored)

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
            self._pending[index] = asyncio.ensure_future(self._run_group(index))
            self._order.append(index)
            self._free -= 1
        self._order = deque(sorted(self._order))

    async def next(self) -> Group:
        """The next group in order; waits for it to finish. Raises EndOfTasks."""
        self._fill()
        if not self._order:
            if self._more:
                raise RuntimeError("every slot is held by groups that were handed out; release some before asking for the next")
            raise EndOfTasks
        index = self._order[0]
        if index in self._restored:
            group = self._restored.pop(index)
        else:
            group = await self._pending[index]
            del self._pending[index]
        self._order.popleft()
        return group

    def release(self, count: int) -> None:
        """Give back the slots of ``count`` groups: they were dropped, or the weights trained on them are published."""
        self._free += count
        if self._ahead:
            self._fill()

    def state(self) -> StreamState:
        """The stream as it could be continued by another process."""
        done = {
            index: task
            for index, task in self._pending.items()
            if task.done() and not task.cancelled() and task.exception() is None
        }
        finished = {**self._restored, **{index: task.result() for index, task in done.items()}}
        unfinished = tuple(sorted([index for index in self._pending if index not in done] + list(self._again)))
        return StreamState(
            next_index=self._next, unfinished=unfinished, finished=tuple(finished[index] for index in sorted(finished))
        )

    async def close(self) -> None:
        """Stop whatever runs."""
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        self._pending.clear()
