"""At most so many requests and tokens in any window."""

from __future__ import annotations

import asyncio

from strop.extensions.judges.llm_client import RateLimit


def passed_at(limit: RateLimit, amounts: list[float], clock: list[float]) -> list[float]:
    """When each of the amounts passes, on a clock that sleeping moves."""

    async def run() -> list[float]:
        return [(await limit.reserve(amount)).time for amount in amounts]

    async def sleep(seconds: float) -> None:
        clock[0] += seconds

    original, asyncio.sleep = asyncio.sleep, sleep  # type: ignore[assignment]
    try:
        return asyncio.run(run())
    finally:
        asyncio.sleep = original


def test_no_window_holds_more_than_the_limit():
    clock = [0.0]
    times = passed_at(RateLimit(5, window=60, clock=lambda: clock[0]), [1.0] * 23, clock)
    assert times == sorted(times) and times[0] == times[4] == 0.0 and times[5] == 60.0
    assert all(sum(start <= time < start + 60 for time in times) <= 5 for start in times)


def test_amounts_count_and_more_than_the_limit_passes_alone():
    clock = [0.0]
    limit = RateLimit(100, window=60, clock=lambda: clock[0])
    assert passed_at(limit, [60, 40, 10, 500, 1], clock) == [0.0, 0.0, 60.0, 120.0, 180.0]


def test_a_reservation_that_turns_out_smaller_leaves_room():
    clock = [0.0]
    limit = RateLimit(100, window=60, clock=lambda: clock[0])
    first = asyncio.run(limit.reserve(90))
    first.amount = 10
    assert passed_at(limit, [80, 20], clock) == [0.0, 60.0]


def test_without_a_limit_nothing_waits():
    assert passed_at(RateLimit(None), [1e9] * 3, [0.0]) == [0.0] * 3
