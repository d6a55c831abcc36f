"""Groups of actors that run every call together, and an actor whose process is replaced when it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from strop.distributed.base import ActorDied, ActorOptions, Cluster, RemoteActor

log = logging.getLogger(__name__)

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


class RestartableActor:
    """``make(*arguments)`` in a process that is started at the first call, and again at the first call after it died.

    A call during which the process dies raises ActorDied; the caller decides whether to repeat it.
    """

    def __init__(self, cluster: Cluster, options: ActorOptions, make: Callable[..., Any], *arguments: Any) -> None:
        self.options = options  # of the next process
        self.remote: RemoteActor | None = None  # the running process
        self.restarts = 0
        self._cluster = cluster
        self._make = make
        self._arguments = arguments
        self._starting = asyncio.Lock()

    async def start(self) -> RemoteActor:
        """Return the running process, or start one. Raises ActorDied, and what ``make`` raises."""
        async with self._starting:
            if self.remote is None:
                self.remote = await self._cluster.spawn(self.options, self._make, *self._arguments)
            return self.remote

    def start_sync(self) -> RemoteActor:
        """Like ``start``, but block this thread."""
        if self.remote is None:
            self.remote = self._cluster.spawn_sync(self.options, self._make, *self._arguments)
        return self.remote

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method; start the process if it does not run. Raises ActorDied, and what the method raises."""
        remote = await self.start()
        try:
            return await remote.call(method, *arguments)
        except ActorDied as error:
            self._discard(remote, error)
            raise

    def call_sync(self, method: str, *arguments: Any) -> Any:
        """Like ``call``, but block this thread."""
        remote = self.start_sync()
        try:
            return remote.start_call(method, *arguments)()
        except ActorDied as error:
            self._discard(remote, error)
            raise

    def _discard(self, remote: RemoteActor, error: ActorDied) -> None:
        if self.remote is remote:  # this caller is the first to notice
            self.remote = None
            self.restarts += 1
            log.warning("%s; another process takes its place", error)
