"""Offset between the clock of another process and ours, from the times at which messages were sent and answered.

The fastest of several exchanges is used: its answer was read between our two readings, so the error of the offset is at most
half the duration of the exchange (Cristian, 1989, "Probabilistic clock synchronization").
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

EXCHANGES = 8


class ClockOffset(NamedTuple):
    """Seconds to add to a time of the other process to get our time, with an error bound."""

    offset: float
    error: float


OWN_CLOCK = ClockOffset(0.0, 0.0)


async def exchange_clocks(read_other: Callable[[], Awaitable[float]], exchanges: int = EXCHANGES) -> ClockOffset:
    """Query the ``time.perf_counter`` of another process several times. Return the offset of the fastest answer."""
    best = ClockOffset(0.0, float("inf"))
    for _ in range(exchanges):
        asked = time.perf_counter()
        other = await read_other()
        answered = time.perf_counter()
        error = (answered - asked) / 2
        if error < best.error:
            best = ClockOffset((asked + answered) / 2 - other, error)
    return best
