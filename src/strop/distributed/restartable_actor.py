"""An actor whose process is replaced when it dies: an engine, an environment, a teacher."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from strop.distributed.base import ActorDied, ActorOptions, Cluster, RemoteActor

log = logging.getLogger(__name__)


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
