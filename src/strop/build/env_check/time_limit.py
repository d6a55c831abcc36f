"""Ends what never returns: plain methods, which keep the event loop, and episodes that wait for something for ever."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

LIMIT_S = 60.0  # of a task, of an episode, and of a plain method
AGAIN_S = 5.0  # after which code that caught the interrupt is interrupted again


class NeverReturned(BaseException):
    """Code of an environment ran for longer than the check waits. No ``except Exception`` of that code catches it."""


@contextmanager
def limit_time() -> Iterator[None]:
    """Raise NeverReturned in the code inside when it takes too long. It can be interrupted in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        where = "" if frame is None else f", in {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
        raise NeverReturned(f"it did not return within {LIMIT_S:g} s{where}")

    before = signal.signal(signal.SIGALRM, interrupt)
    _start_timer()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _start_timer() -> None:
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S, AGAIN_S)


def run_limited(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine as ``asyncio.run`` does. Raises NeverReturned if it keeps the event loop; threads that hang are left behind."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        with limit_time():
            loop.run_until_complete(_beat_beside(work))
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        with suppress(NeverReturned), limit_time():
            rest = asyncio.all_tasks(loop)
            for each in rest:
                each.cancel()
            loop.run_until_complete(asyncio.wait(rest, timeout=AGAIN_S) if rest else asyncio.sleep(0))
            loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()


async def _beat_beside(work: Coroutine[Any, Any, None]) -> None:
    async def beat() -> None:
        while threading.current_thread() is threading.main_thread():
            _start_timer()
            await asyncio.sleep(min(1.0, LIMIT_S / 4))

    beating = asyncio.ensure_future(beat())
    try:
        await work
    finally:
        beating.cancel()


def find_never_returned(error: BaseException | None) -> NeverReturned | None:
    """Return the NeverReturned that an exception was raised from, if there is one."""
    while error is not None and not isinstance(error, NeverReturned):
        error = error.__cause__ or error.__context__
    return error
