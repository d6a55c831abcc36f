"""The number of episodes in flight: additive increase, multiplicative decrease (Chiu and Jain, 1989), as in TCP."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from strop.endings import Ending
from strop.monitoring.waits import waiting
from strop.types import Rollout

OVERLOADED = (Ending.SANDBOX, Ending.PROVIDER_LIMIT)
PREEMPTED_SHARE = 0.05  # of the episodes of a step: above, the caches of the engines are too small for all that run


class AdaptiveConcurrency:
    """Admits at most ``limit`` episodes at once, in the order in which they asked.

    The limit is halved at a sign of overload, at most once per round of episodes, and grows by one for each round without one.
    """

    def __init__(self, most: int) -> None:
        self.most = most  # bound by the slots of the run
        self.limit = float(most)
        self.running = 0
        self.ended = 0  # since ``start_step``
        self._peak = 0  # running at once since the last cut
        self._unheeded = 0  # episodes of the round of the last cut, whose signs of overload are not new
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def admit(self, environment: str) -> AsyncIterator[None]:
        if self._waiting or self.running >= int(self.limit):
            await self._wait()
        else:
            self.running += 1
        self._peak = max(self._peak, self.running)
        try:
            yield
        finally:
            self.running -= 1
            self._wake()

    def observe(self, environment: str, rollout: Rollout) -> bool:
        self.ended += 1
        if self._unheeded:
            self._unheeded -= 1
        elif rollout.ending in OVERLOADED:
            self.cut()
        if rollout.ending not in OVERLOADED:
            self.limit = min(self.limit + 1 / self.limit, self.most)
        self._wake()
        return False

    def end_step(self, preemptions: float) -> None:
        """Take in the number of requests that engines preempted during a step."""
        if preemptions > PREEMPTED_SHARE * self.ended:
            self.cut()
        self.ended = 0

    def cut(self) -> None:
        """Halve the limit. What the episodes that run now report of an overload is as old as this cut, and is not heeded."""
        self.limit = max(1.0, min(self.limit, self._peak) / 2)
        self._unheeded = self._peak = self.running

    async def _wait(self) -> None:
        """Wait for a place, which is counted when it is given."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            with waiting("episode", on="a place among the episodes in flight (pacing.adaptive_concurrency)"):
                await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.running -= 1
                self._wake()
            raise

    def _wake(self) -> None:
        while self._waiting and self.running < int(self.limit):
            place = self._waiting.popleft()
            if not place.done():  # cancelled while it waited
                self.running += 1
                place.set_result(None)
