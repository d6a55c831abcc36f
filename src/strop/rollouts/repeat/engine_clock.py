"""A clock that counts the steps of an embedded engine and orders all events of a run by them.

The engine takes a step when the clock lets it. A rollout is sampled, or its environment works: then its answer (a next request, or its end)
counts from a tick that ``AnswerTimes`` gives. At each tick the clock waits for the answers that count now, lets rollouts end, in order, or
gives the engine its requests, in order, and one step. So which requests share a forward pass, which weights sample a token and which group
finishes first depend on ticks alone. Nothing happens between two calls of ``advance``: the training loop makes them while it waits for
groups.

A tick is a step of the engine, or a moment at which rollouts end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from strop.generation.base import Completion, Generator, Pacer
from strop.monitoring.watchdog.waits import waiting
from strop.rollouts.repeat.answer_times import GROUP_REWARDS, NEVER, AnswerId, AnswerTimes, ReplayEnded
from strop.rollouts.repeat.event_log import EventLog
from strop.rollouts.repeat.journal import GroupJournal, JournalEntry
from strop.sampling import Sampling
from strop.types import PromptImage

T = TypeVar("T")
Submit = Callable[[], Coroutine[Any, Any, Completion]]


class PacedEngine(Generator, Protocol):
    """An embedded engine whose steps a clock allows."""

    pacer: Pacer | None  # takes its steps; None: it takes them itself

    @property
    def load(self) -> int:
        """Requests that run or wait in the engine, without those that were cancelled."""
        ...

    @property
    def room(self) -> int:
        """How many more requests would run at once."""
        ...


@dataclass(eq=False)
class _Part:
    """A rollout, or the rewards of a group: sampled, or waiting for its environment."""

    clock: EngineClock
    group: int
    number: int  # the sample, or GROUP_REWARDS
    asked: int  # the tick at which its environment was asked for the next answer
    due: int | None = None  # the tick from which the answer counts; None: from when it comes
    answers: int = 0
    known: list[JournalEntry] = field(default_factory=list)  # completions from before the run was resumed, not yet used
    ended: bool = False  # the rollout had ended before the run was resumed, and is only made again
    submit: Submit | None = None  # what the answer asks of the engine; None: it is the end
    held: asyncio.Future[Any] | None = None  # resolved when the answer counts, and was sampled; None: the environment still works
    sampling: bool = False

    @property
    def answer(self) -> AnswerId:
        return AnswerId(self.group, self.number, self.answers)

    @property
    def waits(self) -> bool:
        """Whether its answer has come."""
        return self.held is not None and not self.sampling

    def is_late(self, now: int) -> bool:
        """Whether its answer counts by ``now``, or counted before the run was resumed, and has not come."""
        counts = self.ended or bool(self.known) or (self.due is not None and self.due <= now)
        return self.held is None and counts


_part: ContextVar[_Part | None] = ContextVar("strop_part_on_clock", default=None)


class EngineClock:
    """The clock of an engine. It is a ``GroupPace`` of a stream and gives each group its ``GroupClock``."""

    def __init__(self, engine: PacedEngine, times: AnswerTimes, log: EventLog | None = None) -> None:
        """Create a clock, which takes over the steps of ``engine`` with ``attach`` or for the time of ``drive``."""
        self.engine, self.times, self.log = engine, times, log or EventLog()
        self.now = 0  # ticks
        self.published = -1  # the newest version
        self.seconds_waited = 0.0  # for environments, while the engine could have had other work
        self.journals: dict[int, GroupJournal] = {}  # of the unfinished groups
        self.restored: dict[int, GroupJournal] = {}  # of those that a resumed run has not begun again
        self._parts: dict[tuple[int, int], _Part] = {}
        self._undecided: set[int] = set()  # groups that have no parts just now, and go on by themselves
        self._sampling: set[_Part] = set()  # those with a request in the engine
        self._changed = asyncio.Event()
        self._permit = asyncio.Event()
        self._stepped: asyncio.Future[None] | None = None
        self._failure: ReplayEnded | None = None

    def attach(self) -> None:
        self.engine.pacer = self

    # --- groups -----------------------------------------------------------------------------------------------------------

    def begin(self, group: int) -> int:
        """Begin a group, or one of a resumed run again, and return the version of the weights it began with."""
        journal = self.restored.pop(group, None)
        if journal is None:
            journal = GroupJournal(self.engine.version, self.now)
            self.log.begin(self.now, group, journal.version)
        self.journals[group] = journal
        self._undecided.add(group)
        return journal.version

    def end(self, group: int) -> None:
        """End a group; its result is there, or it failed."""
        if self.journals.pop(group, None) is not None:
            self.log.end(self.now, group)
        self._undecided.discard(group)
        for key in [key for key in self._parts if key[0] == group]:
            del self._parts[key]
        self._changed.set()

    def publish(self, version: int) -> None:
        """Write down that the engine has new weights. Raises ReplayEnded if a recorded run had them at another tick."""
        if version != self.published:  # a resumed run publishes the weights of its checkpoint once more
            self.published = version
            self.log.publish(self.now, version)

    def take_seconds_waited(self) -> float:
        """Return how long the engine has waited for environments since the last call (seconds)."""
        waited, self.seconds_waited = self.seconds_waited, 0.0
        return waited

    def begin_group(self, group: int) -> ClockedGroup:
        self.begin(group)
        return self.group(group)

    def group(self, group: int) -> ClockedGroup:
        return ClockedGroup(self, group)

    async def run_part(self, group: int, number: int, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        part = self._parts[group, number]
        _part.set(part)
        result = await work()
        if part.ended:
            self._remove(part)
        else:
            await self._hold(part, None)
        return result

    def _remove(self, part: _Part) -> None:
        """Take out a part that has ended. A group without parts goes on by itself."""
        del self._parts[part.group, part.number]
        if not any(group == part.group for group, _ in self._parts):
            self._undecided.add(part.group)
        self._changed.set()

    def add_part(self, group: int, number: int) -> None:
        """Register what ``run_part`` is going to run."""
        journal = self.journals[group]
        asked = journal.begun
        if number == GROUP_REWARDS:
            asked = journal.scoring = self.now if journal.scoring is None else journal.scoring
        part = _Part(self, group, number, asked, known=list(journal.samples.get(number, ())))
        part.ended = number in journal.ended
        part.due = self._find_due(part)
        self._parts[group, number] = part
        self._undecided.discard(group)
        self._changed.set()

    def _find_due(self, part: _Part) -> int | None:
        try:
            return self.times.due(part.answer, part.asked)
        except ReplayEnded as error:  # not the fault of this rollout: ``advance`` raises it
            self._failure = error
            return part.asked

    async def close(self) -> None:
        self.log.close()

    # --- answers ----------------------------------------------------------------------------------------------------------

    async def generate(self, part: _Part, submit: Submit) -> Completion:
        """Sample for a rollout when its answer counts, or return what it has sampled before the run was resumed."""
        if part.known:
            entry = part.known.pop(0)
            self._ask(part, entry.tick)
            return entry.completion
        completion: Completion = await self._hold(part, submit)
        return completion

    async def _hold(self, part: _Part, submit: Submit | None) -> Any:
        """Return when the answer counts: for a request, when it has been sampled."""
        if part.held is not None:
            raise RuntimeError(
                f"sample {part.number} of group {part.group} asks the policy twice at the same time, in an order that cannot be repeated; "
                "let its environment wait for one reply before it asks for the next, or set repeatable, record_events and replay_events off"
            )
        part.submit, part.held = submit, asyncio.get_running_loop().create_future()
        self._changed.set()
        try:
            return await part.held
        except asyncio.CancelledError:
            if not part.sampling:
                part.held = None
            raise

    def _ask(self, part: _Part, tick: int) -> None:
        """The environment of ``part`` has been asked for its next answer at ``tick``."""
        part.answers += 1
        part.asked, part.held, part.submit = tick, None, None
        part.due = self._find_due(part)

    def _submit(self, part: _Part) -> None:
        assert part.submit is not None and part.due is not None and part.held is not None
        part.sampling = True
        self._sampling.add(part)
        self.log.answer(part.due, part.answer)
        asyncio.ensure_future(part.submit()).add_done_callback(partial(self._on_sampled, part, part.held))

    def _on_sampled(self, part: _Part, held: asyncio.Future[Completion], task: asyncio.Future[Completion]) -> None:
        self._sampling.discard(part)
        part.sampling = False
        error = None if task.cancelled() else task.exception()
        journal = self.journals.get(part.group)
        if not task.cancelled() and error is None and journal is not None:
            journal.samples.setdefault(part.number, []).append(JournalEntry(self.now, task.result()))
        self._ask(part, self.now)
        if held.done():  # who asked was cancelled
            return
        if task.cancelled():
            held.cancel()
        elif error is not None:
            held.set_exception(error)
        else:
            held.set_result(task.result())

    # --- time -------------------------------------------------------------------------------------------------------------

    async def pace(self, step: Callable[[], object]) -> None:
        """Take a step of the engine when the clock allows it; at once while no request of the clock is in the engine."""
        if not self._sampling:
            step()
            return
        await self._permit.wait()
        self._permit.clear()
        try:
            step()
        finally:
            if self._stepped is not None and not self._stepped.done():
                self._stepped.set_result(None)

    async def advance(self) -> None:
        """Let what is due happen: rollouts that end, or requests and a step of the engine. Raises ReplayEnded."""
        await asyncio.sleep(0)  # what was begun runs until it waits
        await self._settle()
        if self._failure is not None:
            raise self._failure
        if await self._end_parts():
            self.now += 1
            return
        self._submit_requests()
        await self._match()
        if self._sampling:
            await self._step()
        else:
            await self._jump()

    async def finish_requests(self) -> None:
        """Step until the engine is empty. Answers that come meanwhile are left for the next ``advance``."""
        while self._sampling:
            await self._step()

    async def drive(self, work: Awaitable[T]) -> T:
        """Run what waits for groups on this clock, with the clock."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._changed.set())
        before, self.engine.pacer = self.engine.pacer, self
        try:
            while True:
                await asyncio.sleep(0)
                await self._settle()
                if task.done():
                    return task.result()
                if self._parts:
                    await self.advance()
                else:
                    await self._wait_for_change()
        finally:
            self.engine.pacer = before
            task.cancel()

    async def _settle(self) -> None:
        """Wait for the answers that count by now."""
        while self._undecided or any(part.is_late(self.now) for part in self._parts.values()):
            await self._wait_for_change()
        for part in self._parts.values():
            if part.waits and part.due is None:
                part.due = self.now

    def _due(self, *, requests: bool) -> list[_Part]:
        """Return the parts whose answers count, in order: those that ask the engine, or those that end."""
        due = [
            (part.due, part.group, part.number, part)
            for part in self._parts.values()
            if part.waits and part.due is not None and part.due <= self.now and (part.submit is not None) == requests
        ]
        return [part for *_, part in sorted(due, key=lambda each: each[:3])]

    async def _end_parts(self) -> bool:
        """End the parts that are due. Return whether there are any; groups that are left without parts have then gone on."""
        ending = self._due(requests=False)
        for part in ending:
            assert part.held is not None and part.due is not None
            self.log.answer(part.due, part.answer)
            self.journals[part.group].ended.add(part.number)
            self._remove(part)
            part.held.set_result(None)
            while part.group in self._undecided:
                await self._wait_for_change()
        return bool(ending)

    def _submit_requests(self) -> None:
        for part in self._due(requests=True)[: self.engine.room]:
            self._submit(part)

    async def _match(self) -> None:
        """Return when all requests have reached the engine, and all that it has finished have reached their rollouts."""
        while len(self._sampling) != self.engine.load:
            await asyncio.sleep(0)

    async def _step(self) -> None:
        self._stepped = asyncio.get_running_loop().create_future()
        self._permit.set()
        await self._stepped
        self._stepped = None
        self.now += 1
        await self._match()

    async def _jump(self) -> None:
        """Go on to the next tick at which an answer counts: the engine has nothing to do."""
        dues = [part.due for part in self._parts.values() if part.due is not None]
        if dues and min(dues) == NEVER:
            raise ReplayEnded(
                f"the recorded run ended at tick {self.now}; replay it with no more steps than it had. If it had as many, the two runs "
                "differ in more than the order of their events. Or set replay_events to null"
            )
        if dues:
            self.now = max(self.now, min(dues))
        elif self._parts:
            await self._wait_for_change()
        else:
            raise RuntimeError("the clock of the engine cannot go on: no group is running, and the run waits for one")

    async def _wait_for_change(self) -> None:
        started = time.perf_counter()
        self._changed.clear()
        with waiting("generation", on="environments whose answers count now", kind="environment"):
            await self._changed.wait()
        self.seconds_waited += time.perf_counter() - started


@dataclass(frozen=True)
class ClockedGroup:
    """The ``GroupClock`` of a group on the clock of the engine."""

    clock: EngineClock
    index: int

    def version(self, generator: Generator) -> int:
        return self.clock.journals[self.index].version

    def episode(self, sample: int, work: Callable[[], Coroutine[Any, Any, T]]) -> Coroutine[Any, Any, T]:
        self.clock.add_part(self.index, sample)
        return self.clock.run_part(self.index, sample, work)

    def rewards(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Coroutine[Any, Any, T]:
        self.clock.add_part(self.index, GROUP_REWARDS)
        return self.clock.run_part(self.index, GROUP_REWARDS, work)


class ClockedGenerator:
    """A ``Generator`` that answers the requests of a rollout on the clock which the rollout is on."""

    def __init__(self, engine: PacedEngine) -> None:
        self.engine = engine

    @property
    def version(self) -> int:
        return self.engine.version

    async def generate(
        self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "", images: Sequence[PromptImage] = ()
    ) -> Completion:
        shown = {"images": images} if images else {}
        submit = partial(self.engine.generate, prompt, sampling=sampling, seed=seed, session=session, **shown)
        part = _part.get()
        return await submit() if part is None else await part.clock.generate(part, submit)

    async def close(self) -> None:
        await self.engine.close()
