"""A group of actors that run every call together: the ranks of a learner."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from strop.cluster.base import HostDied, Remote

REASONS = 2.0  # seconds to wait for the errors of other members after one has failed


class GroupDied(RuntimeError):
    """A member of a group died, so its call failed for all; the message says which member."""


class WorkerGroup:
    """Actors that all receive the same calls in the same order, as collectives require."""

    def __init__(self, name: str, members: Sequence[Remote]) -> None:
        self.name = name
        self.members = tuple(members)
        self._died: GroupDied | None = None

    async def all(self, method: str, *arguments: Any, urgent: bool = False) -> list[Any]:
        """Call a method on every member. Return the results by rank. Raises GroupDied if a member died, else what the first one raised.

        The call is submitted to all members before the first await, so that calls of concurrent tasks arrive in the same order."""
        if self._died is not None:
            raise self._died
        calls = [asyncio.ensure_future(member.call(method, *arguments, urgent=urgent)) for member in self.members]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if all(call.exception() is None for call in done):
            return [call.result() for call in calls]
        await asyncio.wait(calls, timeout=REASONS)  # others may report the actual cause
        cause = self._cause([call.exception() for call in calls if call.done()])
        await self._end(calls)
        raise cause

    async def one(self, rank: int, method: str, *arguments: Any, urgent: bool = False) -> Any:
        """Call a method on one member. Raises GroupDied if it died, and what the method raises."""
        if self._died is not None:
            raise self._died
        try:
            return await self.members[rank].call(method, *arguments, urgent=urgent)
        except HostDied as error:
            raise self._dead(error) from error

    def now(self, method: str, *arguments: Any, urgent: bool = False) -> list[Any]:
        """Like ``call_all``, but block this thread."""
        if self._died is not None:
            raise self._died
        waiters = ThreadPoolExecutor(len(self.members), thread_name_prefix="strop-group")
        answers = [waiters.submit(member.wait(method, *arguments, urgent=urgent)) for member in self.members]
        waiters.shutdown(wait=False)
        done, _ = futures.wait(answers, return_when=futures.FIRST_EXCEPTION)
        if all(answer.exception() is None for answer in done):
            return [answer.result() for answer in answers]
        futures.wait(answers, timeout=REASONS)  # a member in a collective may wait much longer for a dead one
        raise self._cause([answer.exception() for answer in answers if answer.done()])

    async def _end(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        """Kill all members after one has failed: the others may wait for it forever in a collective."""
        await self.close()
        _, stuck = await asyncio.wait(calls, timeout=10.0)
        for call in stuck:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _cause(self, errors: Sequence[BaseException | None]) -> BaseException:
        """Return a member's own error if there is one, else the death of a member, else a member's error about a lost peer."""
        raised = [error for error in errors if error is not None]
        own = [error for error in raised if not isinstance(error, HostDied) and not _of_peer(error)]
        died = [error for error in raised if isinstance(error, HostDied)]
        return own[0] if own else self._dead(died[0]) if died else self._dead(raised[0])

    def _dead(self, error: BaseException) -> GroupDied:
        self._died = GroupDied(f"the {self.name} group lost a member: {error}")
        return self._died

    async def close(self) -> None:
        await asyncio.gather(*(member.kill() for member in self.members), return_exceptions=True)


def _of_peer(error: BaseException) -> bool:
    """Return whether the error is that of a collective that lost another rank."""
    text = str(error).lower()
    return any(
        sign in text
        for sign in ("connection closed by peer", "connection reset by peer", "socket timeout", "broken pipe", "nccl")
    )
