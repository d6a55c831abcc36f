"""A group of actors that run every call together: the ranks of a learner."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from strop.distributed.base import ActorDied, RemoteActor

ERROR_GRACE_SECONDS = 2.0  # seconds to wait for the errors of other members after one has failed


class ActorGroupDied(RuntimeError):
    """A member of a group died, so its call failed for all; the message says which member."""


class ActorGroup:
    """Actors that all receive the same calls in the same order, as collectives require."""

    def __init__(self, name: str, actors: Sequence[RemoteActor]) -> None:
        self.name = name
        self.actors = tuple(actors)
        self._died: ActorGroupDied | None = None

    async def call_all(self, method: str, *arguments: Any, urgent: bool = False) -> list[Any]:
        """Call a method on every member. Return the results by rank. Raises ActorGroupDied if a member died, else the first member's
        error.

        The call is submitted to all members before the first await, so that calls of concurrent tasks arrive in the same order."""
        return await self.call_each(method, [arguments] * len(self.actors), urgent=urgent)

    async def call_each(self, method: str, arguments: Sequence[Sequence[Any]], *, urgent: bool = False) -> list[Any]:
        """Like ``call_all``, with separate arguments for each member."""
        if self._died is not None:
            raise self._died
        calls = [
            asyncio.ensure_future(member.call(method, *own, urgent=urgent))
            for member, own in zip(self.actors, arguments, strict=True)
        ]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if all(call.exception() is None for call in done):
            return [call.result() for call in calls]
        await asyncio.wait(calls, timeout=ERROR_GRACE_SECONDS)  # others may report the actual cause
        cause = self._find_cause([call.exception() for call in calls if call.done()])
        await self._shut_down(calls)
        raise cause

    async def call_one(self, rank: int, method: str, *arguments: Any, urgent: bool = False) -> Any:
        """Call a method on one member. Raises ActorGroupDied if it died, and what the method raises."""
        if self._died is not None:
            raise self._died
        try:
            return await self.actors[rank].call(method, *arguments, urgent=urgent)
        except ActorDied as error:
            raise self._mark_dead(error) from error

    def call_all_sync(self, method: str, *arguments: Any, urgent: bool = False) -> list[Any]:
        """Like ``call_all``, but block this thread."""
        if self._died is not None:
            raise self._died
        executor = ThreadPoolExecutor(len(self.actors), thread_name_prefix="strop-group")
        calls = [executor.submit(member.start_call(method, *arguments, urgent=urgent)) for member in self.actors]
        executor.shutdown(wait=False)
        done, _ = futures.wait(calls, return_when=futures.FIRST_EXCEPTION)
        if all(call.exception() is None for call in done):
            return [call.result() for call in calls]
        futures.wait(calls, timeout=ERROR_GRACE_SECONDS)  # a member in a collective may wait much longer for a dead one
        raise self._find_cause([call.exception() for call in calls if call.done()])

    async def _shut_down(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        """Kill all members after one has failed, because the others may wait for it forever in a collective."""
        await self.close()
        _, pending = await asyncio.wait(calls, timeout=10.0)
        for call in pending:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _find_cause(self, errors: Sequence[BaseException | None]) -> BaseException:
        """Return a member's own error if there is one, otherwise the death of a member, otherwise an error about a lost peer."""
        raised = [error for error in errors if error is not None]
        own_errors = [error for error in raised if not isinstance(error, ActorDied) and not _is_peer_failure(error)]
        deaths = [error for error in raised if isinstance(error, ActorDied)]
        return own_errors[0] if own_errors else self._mark_dead(deaths[0]) if deaths else self._mark_dead(raised[0])

    def _mark_dead(self, error: BaseException) -> ActorGroupDied:
        self._died = ActorGroupDied(f"the {self.name} group lost a member: {error}")
        return self._died

    async def close(self) -> None:
        await asyncio.gather(*(member.kill() for member in self.actors), return_exceptions=True)


def _is_peer_failure(error: BaseException) -> bool:
    """Return whether the error comes from a collective that lost another rank."""
    text = str(error).lower()
    return any(
        marker in text
        for marker in ("connection closed by peer", "connection reset by peer", "socket timeout", "broken pipe", "nccl")
    )
