"""Work under way: the SDK asks for something, is told its name, and comes back for the result."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from strop.extensions.tinker.datum_batch import TinkerRequestError
from strop.generation.base import InvalidRequest

log = logging.getLogger(__name__)

Result = bytes | dict[str, Any]  # protobuf or JSON

KEPT_RESULTS = 512  # results that were fetched, for clients that lost the answer
POLL_SECONDS = 20.0  # the SDK gives up a poll after 45


class Promises:
    """Tasks by the names that clients know them by."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[str, asyncio.Task[Result]] = OrderedDict()
        self._fetched: OrderedDict[str, None] = OrderedDict()

    def start(self, name: str, work: Callable[[], Awaitable[Result]]) -> str:
        """Start ``work``, unless a request of this name was already received: the SDK repeats requests whose answer it lost."""
        if name not in self._tasks:
            self._tasks[name] = asyncio.ensure_future(_answer(work))
        return name

    async def retrieve(self, name: str) -> Result | None:
        """Return the result, or None if it takes longer than a poll should. Raises KeyError for an unknown name."""
        task = self._tasks[name]
        await asyncio.wait([task], timeout=POLL_SECONDS)
        if not task.done():
            return None
        self._fetched[name] = None
        while len(self._fetched) > KEPT_RESULTS:
            oldest, _ = self._fetched.popitem(last=False)
            self._tasks.pop(oldest, None)
        return task.result()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


async def _answer(work: Callable[[], Awaitable[Result]]) -> Result:
    """Await the work. An error is a result, too: the SDK raises it in the client."""
    try:
        return await work()
    except (TinkerRequestError, InvalidRequest) as error:
        return {"error": str(error), "category": "user"}
    except Exception as error:
        log.exception("a request of a Tinker client failed")
        return {"error": f"the server failed ({type(error).__name__}); its log says why", "category": "server"}


class CallOrder:
    """Runs the calls of one model in the order of their numbers, which begin with 1, though requests may arrive in another one."""

    WAIT_SECONDS = 600.0  # for a call that a client has not sent

    def __init__(self) -> None:
        self._next = 1
        self._changed = asyncio.Condition()

    async def run(self, number: int, work: Callable[[], Result]) -> Result:
        """Run ``work`` in a thread when it is its turn. Raises TinkerRequestError if the call before it never comes."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._next >= number), self.WAIT_SECONDS)
            except TimeoutError as error:
                raise TinkerRequestError(
                    f"call {number} of this model waited {self.WAIT_SECONDS:.0f} s for call {self._next}, which was not sent"
                ) from error
            try:
                return await asyncio.to_thread(work)
            finally:
                self._next = max(self._next, number + 1)
                self._changed.notify_all()
