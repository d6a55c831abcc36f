"""The stream of rollout groups for training, with a bounded number of groups in flight, and which group is trained on next.

    slots = (max_staleness + 1) x groups per step

A group occupies a slot from its start until it is dropped, or until the weights trained on it are published. So when a group starts, at
most ``slots`` - 1 earlier groups are not yet published. In the order in which they were started, each group is therefore trained on by a
policy at most ``max_staleness`` steps newer than the one that started it.

With k = max_staleness, the *deadline* of a group started with weight version v is step v + k: the last step that may train on it.
``Fifo`` and ``Windowed`` meet every deadline; ``DropTooOld`` does not wait for slow groups, and groups that miss theirs are dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Protocol

from strop.endings import Ending, Who
from strop.environments.forks import end_forks
from strop.types import Group, Rollout

POLL_SECONDS = 1.0  # between two looks at the age of a group that is not ending


class EpisodeGate(Protocol):
    """Decides when an episode may start, for example while a sandbox is full. Added to ``SampledSource.gates`` by a listener.

    Waiting at a gate does not change the age of a group or the number of groups in flight.
    """

    def admit(self, environment: str) -> AbstractAsyncContextManager[object]:
        """Wait until an episode may start; the block is the episode. An exception ends the run."""
        ...

    def observe(self, environment: str, rollout: Rollout) -> bool:
        """See how an episode ended. Return whether to sample it again, because it failed by no fault of the policy."""
        ...


async def sample_until_counted(
    environment: str, sample: Callable[[int], Awaitable[Rollout]], *, retries: int, gates: Sequence[EpisodeGate]
) -> Rollout:
    """Run ``sample(attempt)`` until it does not fail, or does so by the policy's fault, at most ``retries`` times after the first.
    Attempts that a gate asks for are not counted.
    """
    attempt = 0
    while True:
        async with AsyncExitStack() as stack:
            for gate in gates:
                await stack.enter_async_context(gate.admit(environment))
            rollout = await sample(attempt)
        refused = [gate for gate in gates if gate.observe(environment, rollout)]
        if rollout.ending is None or rollout.ending.who != Who.INFRASTRUCTURE or not (refused or retries > 0):
            return rollout
        retries -= not refused
        attempt += 1


async def gather_until_lost(
    tasks: Sequence[asyncio.Task[Rollout]], is_lost: Callable[[Sequence[Rollout]], bool] | None
) -> list[Rollout | None]:
    """Await the rollouts of a group. Once ``is_lost`` is true of those that ended, the others are cancelled and None."""
    running = set(tasks)
    try:
        while running:
            seconds = None if is_lost is None else POLL_SECONDS
            ended, running = await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
            if running and is_lost is not None and is_lost([task.result() for task in tasks if task.done()]):
                break
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return [None if task.cancelled() else task.result() for task in tasks]


def is_beyond_training(ended: Sequence[Rollout], samples: int, min_rollouts: int) -> bool:
    """Return whether a group of ``samples`` rollouts, of which these have ended, will be dropped whatever the others do.

    It will if code failed without a cause, if the greedy baseline failed, or if fewer than ``min_rollouts`` are left.
    """
    failed = [rollout for rollout in ended if rollout.error is not None and not rollout.counts]
    fatal = any(rollout.ending == Ending.ERROR or rollout.sample == samples for rollout in failed)
    return fatal or (bool(failed) and samples - len(failed) < min(min_rollouts, samples))


@dataclass(frozen=True)
class PendingGroup:
    """A group that occupies a slot and has not been returned by the stream."""

    index: int
    version: int  # weight version when it was started
    finish_rank: int | None  # number of groups that finished before it; None while it runs


class GroupOrder(Protocol):
    """Chooses the next group of a stream."""

    drops_stale: ClassVar[bool]  # whether it may return groups that are too old to train on, which are then dropped

    def choose(self, pending: Sequence[PendingGroup], *, now: int, taken: int) -> PendingGroup | None:
        """Return the finished group to train on next, or None to wait until another one finishes.

        ``pending`` is sorted by index and not empty. ``now`` is the version of the newest published weights, which is also the step being
        collected; ``taken`` groups were already returned for it. If every group is finished, the result is never None.
        """
        ...

    def sort(self, pending: Sequence[PendingGroup]) -> Sequence[PendingGroup]:
        """Sort the groups into the order in which they would be chosen if all were finished and no others were started."""
        ...


@dataclass(frozen=True)
class Fifo:
    """Returns groups in the order in which they were started: runs are reproducible, but a slow group delays those after it."""

    drops_stale: ClassVar[bool] = False

    def choose(self, pending: Sequence[PendingGroup], *, now: int, taken: int) -> PendingGroup | None:
        return pending[0] if pending[0].finish_rank is not None else None

    def sort(self, pending: Sequence[PendingGroup]) -> Sequence[PendingGroup]:
        return sorted(pending, key=lambda group: group.index)


@dataclass(frozen=True, kw_only=True)
class Windowed:
    """Returns the oldest finished group among the ``window`` oldest, as long as all others can still meet their deadlines.

    The oldest group may always be chosen, so the stream never deadlocks; its deadline bounds how far a slow group can be overtaken.
    """

    window: int  # groups
    groups_per_step: int
    max_staleness: int

    drops_stale: ClassVar[bool] = False

    def choose(self, pending: Sequence[PendingGroup], *, now: int, taken: int) -> PendingGroup | None:
        """Return the oldest finished group of the window that may overtake those of older versions.

        Until the end of step now + j, (j + 1) x groups_per_step - taken more groups can be trained on. Every deadline can be met if, for
        every j, at most that many groups are due by then. Choosing a group uses up one of these positions, but reduces the number of
        due groups only from its own deadline on. So at each earlier deadline, one position must be left over.
        """
        oldest = self.sort(pending)
        for position, group in enumerate(oldest[: self.window]):
            if position and oldest[position - 1].version < group.version:  # the ``position`` groups before it are due earlier
                deadline = oldest[position - 1].version + self.max_staleness
                if position >= (deadline - now + 1) * self.groups_per_step - taken:
                    return None
            if group.finish_rank is not None:
                return group
        return None

    def sort(self, pending: Sequence[PendingGroup]) -> Sequence[PendingGroup]:
        return sorted(pending, key=lambda group: (group.version, group.index))


@dataclass(frozen=True)
class DropTooOld:
    """Returns groups in the order in which they finished; the training loop drops those that are too old by then."""

    drops_stale: ClassVar[bool] = True

    def choose(self, pending: Sequence[PendingGroup], *, now: int, taken: int) -> PendingGroup | None:
        first = self.sort(pending)[0]
        return first if first.finish_rank is not None else None

    def sort(self, pending: Sequence[PendingGroup]) -> Sequence[PendingGroup]:
        return sorted(pending, key=lambda group: (group.finish_rank is None, group.finish_rank or 0, group.index))


RunGroup = Callable[[int], Awaitable[Group]]


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """The state to resume a stream from: finished groups, and tasks to restart."""

    next_index: int  # the first task that was never started
    unfinished: tuple[int, ...]  # started but not finished: restarted with the same seeds
    finished: tuple[Group, ...]  # finished but not trained on


def requeue_stale(
    state: StreamState,
    *,
    step: int,
    groups_per_step: int,
    max_staleness: int,
    order: GroupOrder | None = None,
) -> StreamState:
    """Return the state with finished groups that would be too old to train on moved to ``unfinished``.

    This only happens if settings changed before the run was resumed. For an order that drops old groups, the state is returned unchanged.
    Unfinished groups begin again with the newest weights.
    """
    order = order or Fifo()
    if order.drops_stale:
        return state
    pending = [PendingGroup(index, step, None) for index in state.unfinished]
    pending += [PendingGroup(group.index, group.version, rank) for rank, group in enumerate(state.finished)]
    trained_at = {group.index: step + position // groups_per_step for position, group in enumerate(order.sort(pending))}
    finished = tuple(group for group in state.finished if trained_at[group.index] - group.version <= max_staleness)
    restarted = tuple(sorted({*trained_at} - {group.index for group in finished}))
    return StreamState(next_index=state.next_index, unfinished=restarted, finished=finished)


class EndOfTasks(Exception):
    """The stream has no more tasks in any epoch."""


class GroupStream(Protocol):
    """The training loop's source of groups: sampled or recorded rollouts."""

    async def next(self) -> Group:
        """Return the next group in the stream's order. Raises EndOfTasks."""
        ...

    def release(self, count: int) -> None:
        """Free the slots of ``count`` groups that were dropped or whose trained weights are published."""
        ...

    async def drain(self) -> None:
        """Wait until no group is running."""
        ...

    def state(self) -> StreamState: ...

    async def close(self) -> None: ...


class RolloutStream:
    """Starts groups while slots are free and returns them in the order of an order policy."""

    def __init__(
        self,
        run_group: RunGroup,
        *,
        slots: int,
        size: int | None = None,
        has: Callable[[int], bool] = lambda index: True,
        state: StreamState | None = None,
        refill_on_release: bool = False,
        order: GroupOrder | None = None,
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        """Create a stream.

        ``run_group(index)`` runs the index-th task; ``size`` is the number of tasks, None if unbounded or unknown;
        ``has(index)`` then says whether there is such a task. With ``refill_on_release``, a freed
        slot is filled at once (asynchronous training). Otherwise groups are started when the next one is requested, so that nothing runs
        while a synchronous run validates or saves. ``order`` None is FIFO. ``version()`` returns the generators' weight version, from which
        an order computes the age of a group.
        """
        self._run_group = run_group
        self._free_slots = slots
        self._size = size
        self._has = has
        self._refill_on_release = refill_on_release
        self._order = order or Fifo()
        self._version = version
        self._next = state.next_index if state else 0
        self._restart = deque(state.unfinished if state else ())
        self._running: dict[int, asyncio.Task[Group]] = {}  # running, or finished in this process
        self._restored = {group.index: group for group in state.finished} if state else {}
        self._pending = {
            index: PendingGroup(index, group.version, rank) for rank, (index, group) in enumerate(self._restored.items())
        }
        self._finished_count = len(self._pending)
        self._finish_event = asyncio.Event()
        self._free_slots -= len(self._pending)
        self._taken = 0  # returned, slot not released

    @property
    def _has_more(self) -> bool:
        """Whether there is a task to start."""
        return bool(self._restart) or (self._has(self._next) if self._size is None else self._next < self._size)

    def _fill(self) -> None:
        """Start a task in every free slot."""
        while self._free_slots > 0 and self._has_more:
            if self._restart:
                index = self._restart.popleft()
            else:
                index, self._next = self._next, self._next + 1
            self._pending[index] = PendingGroup(index, self._version(), None)
            self._running[index] = asyncio.ensure_future(self._run_group(index))
            self._running[index].add_done_callback(partial(self._on_finished, index))
            self._free_slots -= 1

    def _on_finished(self, index: int, task: asyncio.Task[Group]) -> None:
        if index in self._pending:
            self._pending[index] = replace(self._pending[index], finish_rank=self._finished_count)
            self._finished_count += 1
            self._finish_event.set()

    async def next(self) -> Group:
        """Return the next group in the order, waiting for it to finish if necessary. Raises EndOfTasks."""
        self._fill()
        if not self._pending:
            if self._has_more:
                raise RuntimeError("every slot is held by groups that were returned; release some before requesting the next")
            raise EndOfTasks
        index = await self._choose()
        group = self._restored.pop(index) if index in self._restored else await self._running[index]
        self._running.pop(index, None)
        del self._pending[index]
        self._taken += 1
        return group

    async def _choose(self) -> int:
        """Wait for the group to return next, and return its index."""
        while True:
            pending = [self._pending[index] for index in sorted(self._pending)]
            chosen = self._order.choose(pending, now=self._version(), taken=self._taken)
            if chosen is not None:
                return chosen.index
            if all(group.finish_rank is not None for group in pending):
                raise RuntimeError(f"{type(self._order).__name__} chose none of {len(pending)} groups, although all are finished")
            self._finish_event.clear()
            await self._finish_event.wait()

    def release(self, count: int) -> None:
        """Free the slots of ``count`` groups that were dropped or whose trained weights are published."""
        self._free_slots += count
        self._taken -= count
        if self._refill_on_release:
            self._fill()

    async def drain(self) -> None:
        """Wait until no group is running. Results are kept; an exception is raised when its group is requested."""
        while running := [task for task in self._running.values() if not task.done()]:
            await asyncio.wait(running)

    def state(self) -> StreamState:
        """Return the state to resume from in another process, with finished groups in the order in which they finished."""
        done = {
            index: task.result()
            for index, task in self._running.items()
            if task.done() and not task.cancelled() and task.exception() is None
        }
        finished = sorted({**self._restored, **done}.values(), key=self._finish_order)
        unfinished = tuple(sorted([index for index in self._running if index not in done] + list(self._restart)))
        return StreamState(next_index=self._next, unfinished=unfinished, finished=tuple(finished))

    def _finish_order(self, group: Group) -> tuple[int, int]:
        rank = self._pending[group.index].finish_rank
        return (self._finished_count if rank is None else rank, group.index)

    async def close(self) -> None:
        """Cancel the running groups, and end the processes that their rewards forked."""
        tasks = list(self._running.values())
        self._running.clear()
        self._pending.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        end_forks()
