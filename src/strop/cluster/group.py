"""Processes that do everything together: the ranks of a learner."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from strop.cluster.base import HostDied, Remote

REASONS = 2.0  # seconds that members have to say why they failed, once one of them has


class GroupDied(RuntimeError):
    """One member of a group is gone, and with it what the group was doing; the message says which."""


class WorkerGroup:
    """Every call goes to every member, in the same order: what one does, all do, as their collectives want it."""

    def __init__(self, name: str, members: Sequence[Remote]) -> None:
        self.name = name
        self.members = tuple(members)
        self._died: GroupDied | None = None

    async def all(self, method: str, *arguments: Any, urgent: bool = False) -> list[Any]:
        """What each member answers, by rank. Raises GroupDied where one died, and what the first one raised that failed.

        Submitted to all before anything is awaited, so that calls of several tasks cannot cross."""
        if self._died is not None:
            raise self._died
        calls = [asyncio.ensure_future(member.call(method, *arguments, urgent=urgent)) for member in self.members]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if all(call.exception() is None for call in done):
            return [call.result() for call in calls]
        await asyncio.wait(calls, timeout=REASONS)  # the others' own reasons, where they have any
        cause = self._cause([call.exception() for call in calls if call.done()])
        await self._end(calls)
        raise cause

    async def one(self, rank: int, method: str, *arguments: Any, urgent: bool = False) -> Any:
        if self._died is not None:
            raise self._died
        try:
            return await self.members[rank].call(method, *arguments, urgent=urgent)
        except HostDied as error:
            raise self._dead(error) from error

    def now(self, method: str, *arguments: Any, urgent: bool = False) -> list[Any]:
        """As ``all``, with this thread standing still meanwhile. Raises GroupDied."""
        if self._died is not None:
            raise self._died
        waiters = ThreadPoolExecutor(len(self.members), thread_name_prefix="strop-group")
        answers = [waiters.submit(member.wait(method, *arguments, urgent=urgent)) for member in self.members]
        waiters.shutdown(wait=False)
        done, _ = futures.wait(answers, return_when=futures.FIRST_EXCEPTION)
        if all(answer.exception() is None for answer in done):
            return [answer.result() for answer in answers]
        futures.wait(answers, timeout=REASONS)  # one that waits in a collective for a dead one may wait long
        raise self._cause([answer.exception() for answer in answers if answer.done()])

    async def _end(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        """Where one failed the others may wait for it for ever: the group is of no more use."""
        await self.close()
        _, stuck = await asyncio.wait(calls, timeout=10.0)
        for call in stuck:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _cause(self, errors: Sequence[BaseException | None]) -> BaseException:
        """What a member raised by itself; else that one died; else that its peers went away."""
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
    """Whether a collective says that another rank went away."""
    text = str(error).lower()
    return any(
        sign in text
        for sign in ("connection closed by peer", "connection reset by peer", "socket timeout", "broken pipe", "nccl")
    )
