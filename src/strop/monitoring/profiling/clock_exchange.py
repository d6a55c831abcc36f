"""How far the clock of another process is from ours, from the times at which messages were sent and answered.

Of several exchanges the fastest counts: its answer was read between our two readings, so the offset is off by at most half of the time that
the exchange took (Cristian, 1989, "Probabilistic clock synchronization").
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

EXCHANGES = 8


class ClockOffset(NamedTuple):
    """What to add to a time of the other process for our time, in seconds, and by how much that may be off."""

    offset: float
    error: float


OWN_CLOCK = ClockOffset(0.0, 0.0)


async def exchange_clocks(read_other: Callable[[], Awaitable[float]], exchanges: int = EXCHANGES) -> ClockOffset:
    """Ask for the ``time.perf_counter`` of another process several times. Return the offset of the fastest answer."""
    best = ClockOffset(0.0, float("inf"))
    for _ in range(exchanges):
        asked = time.perf_counter()
        other = await read_other()
        answered = time.perf_counter()
        error = (answered - asked) / 2
        if error < best.error:
            best = ClockOffset((asked + answered) / 2 - other, error)
    return best
