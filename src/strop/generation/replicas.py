"""Several engines as one generator: who gets a request, and what happens when an engine dies.

A request goes to the engine that has read most of it before: turns of a conversation to the one that had the turn before, samples of one
prompt to the one that had the first of them. That saves reading only as long as nobody waits for it, so an engine that has many more
requests than the others gets no new ones.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from strop.generation.base import Completion, Engine
from strop.sampling import Sampling
from strop.watch.waits import waiting
from strop.weights.base import EngineDied, EngineLost, WeightHolder

log = logging.getLogger(__name__)

Revive = Callable[[WeightHolder], Awaitable[None]]
"""Starts an engine anew and gives it weights."""

REMEMBERED = 65_536  # prompts and sessions whose engine is known


class Router:
    """Which engine has read what. Names of sessions and whole prompts are remembered, the least recently asked forgotten first."""

    def __init__(self, engines: int, *, imbalance: int = 8) -> None:
        """``imbalance`` requests more than the least busy engine, or a quarter more, keep a request from its engine."""
        self.running = [0] * engines
        self.imbalance = imbalance
        self._owners: OrderedDict[str | tuple[int, ...], int] = OrderedDict()

    def route(self, prompt: tuple[int, ...], session: str, without: Collection[int] = ()) -> int:
        """The engine for a request, none of ``without``; the caller counts it in ``running``."""
        least = min((place for place in range(len(self.running)) if place not in without), key=self.running.__getitem__)
        owner = self._owners.get(session) if session else None
        if owner is None:
            owner = self._owners.get(prompt)
        if (
            owner is None
            or owner in without
            or self.running[owner] > self.running[least] + max(self.imbalance, self.running[least] // 4)
        ):
            owner = least
        for key in (session, prompt):
            if key:
                self._owners[key] = owner
                self._owners.move_to_end(key)
        while len(self._owners) > REMEMBERED:
            self._owners.popitem(last=False)
        return owner


class Replicas:
    """A ``Generator`` over engines. A request whose engine dies is issued again, with the same seed, once that engine lives again."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        max_restarts: int = 3,
        shrinks: bool = False,
        on_close: Sequence[Callable[[], object]] = (),
    ) -> None:
        """``max_restarts`` of one engine without an answer between them end the run. ``shrinks``: an engine whose node is lost is done
        without, as long as another is left. ``on_close`` is called when all engines are gone."""
        self.engines = tuple(engines)
        self.version = -1  # of the last publish that all of them have
        self.revive: Revive | None = None  # set by who publishes weights
        self.max_restarts = max_restarts
        self.shrinks = shrinks
        self.restarts = 0  # of all engines, in all
        self.on_close = list(on_close)
        self._failures = [0] * len(self.engines)  # in a row
        self._reviving: dict[int, asyncio.Task[None]] = {}
        self._unfit: dict[int, Exception] = {}  # why an engine that lives could not be given weights, until the next publish
        self._gone: set[int] = set()  # engines that are done without
        self._router = Router(len(self.engines))
        self._before: dict[str, float] = {}

    async def generate(self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "") -> Completion:
        key = tuple(prompt)
        while True:
            place = self._router.route(key, session, self._gone)
            await self._usable(place)
            self._router.running[place] += 1
            try:
                completion = await self.engines[place].generate(prompt, sampling=sampling, seed=seed, session=session)
                self._failures[place] = 0
                return completion
            except EngineDied as error:
                await self._revived(place, error)
            finally:
                self._router.running[place] -= 1

    async def _revived(self, place: int, error: EngineDied) -> None:
        """Wait until the engine lives again; whoever comes first starts it. Raises EngineDied where that was tried too often."""
        if place not in self._reviving and not self.engines[place].alive:
            self._reviving[place] = asyncio.create_task(self._restart(place, error))
            self._reviving[place].add_done_callback(lambda task: self._reviving.pop(place, None))
        await self._usable(place)

    async def _usable(self, place: int) -> None:
        """Whoever asked an engine that is being started would wait for weights that it may never get."""
        if (task := self._reviving.get(place)) is not None:
            with waiting("request", on=f"{self.engines[place].name}, which died, to be started anew"):
                await asyncio.shield(task)
        if (unfit := self._unfit.get(place)) is not None:
            raise unfit

    async def _restart(self, place: int, error: EngineDied) -> None:
        """Until it lives and has weights: an engine that has none keeps its requests waiting."""
        engine = self.engines[place]
        while not engine.alive:
            if self.revive is None or self._failures[place] >= self.max_restarts:
                raise EngineDied(
                    f"{error}; it was started anew {self._failures[place]} times without one answer "
                    "(policy.generation.vllm_cfg.max_restarts), so the cause will not go away by itself: its own output says what it is"
                ) from error
            self._failures[place] += 1
            self.restarts += 1
            log.warning("%s; it is started anew, and its requests are issued again", error)
            try:
                await self.revive(engine)
            except EngineLost:
                if not self.drop(engine):
                    raise
                return
            except EngineDied as again:
                error = again
            except Exception as unfit:
                self._unfit[place] = unfit
                raise

    def drop(self, engine: WeightHolder) -> bool:
        """Do without an engine that cannot be started anew, if that is allowed and another is left; returns whether it is done without."""
        place = next(place for place, other in enumerate(self.engines) if other is engine)
        if place in self._gone:
            return True
        if not self.shrinks or len(self._gone) + 1 >= len(self.engines):
            return False
        self._gone.add(place)
        log.warning(
            "%s cannot be started anew; its requests go to the %d others", engine.name, len(self.engines) - len(self._gone)
        )
        return True

    def published(self, version: int) -> None:
        """All engines hold the weights of ``version``."""
        self.version = version
        self._unfit.clear()

    def metrics(self) -> Mapping[str, float]:
        """What the engines did since this was last asked, and how they are now."""
        now: dict[str, float] = {}
        for name, value in itertools.chain.from_iterable(engine.counters().items() for engine in self.engines):
            now[name] = now.get(name, 0.0) + value
        since = {name: max(0.0, value - self._before.get(name, 0.0)) for name, value in now.items()}
        self._before = now
        found = {
            "generation/preemptions": since.get("preemptions", 0.0),
            "generation/restarts": float(self.restarts),
            "generation/engines": float(len(self.engines) - len(self._gone)),
        }
        if since.get("prefix_queries"):
            found["generation/prefix_hit_rate"] = since.get("prefix_hits", 0.0) / since["prefix_queries"]
        if since.get("drafted_tokens"):
            found["generation/acceptance_rate"] = since.get("accepted_tokens", 0.0) / since["drafted_tokens"]
        return found

    async def close(self) -> None:
        for task in list(self._reviving.values()):
            task.cancel()
        await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)
        for close in self.on_close:
            if inspect.isawaitable(closing := close()):
                await closing
