"""At most so much in any window of time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Reservation:
    """A part of the limit, from a moment on. ``amount`` may be corrected when it is known."""

    amount: float
    time: float


class RateLimit:
    """Lets at most ``limit`` through in any ``window`` seconds, in the order of asking. For the coroutines of one event loop."""

    def __init__(self, limit: float | None, *, window: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.window = window
        self._clock = clock
        self._reserved: deque[Reservation] = deque()
        self._turn = asyncio.Lock()

    async def reserve(self, amount: float = 1.0) -> Reservation:
        """Wait until ``amount`` fits and return its reservation. More than the limit passes when nothing else is reserved."""
        if self.limit is None:
            return Reservation(amount, 0.0)
        async with self._turn:
            while (wait := self._seconds_until_it_fits(amount)) > 0:
                await asyncio.sleep(wait)
            reservation = Reservation(amount, self._clock())
            self._reserved.append(reservation)
            return reservation

    def _seconds_until_it_fits(self, amount: float) -> float:
        assert self.limit is not None
        now = self._clock()
        while self._reserved and self._reserved[0].time + self.window <= now:
            self._reserved.popleft()
        excess = sum(each.amount for each in self._reserved) + amount - self.limit
        wait = 0.0
        for each in self._reserved:  # the oldest leave the window first
            if excess <= 0:
                break
            excess -= each.amount
            wait = each.time + self.window - now
        return wait
