"""Environments in separate processes. A process that dies is replaced at the next call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from strop.distributed.base import ActorDied, ActorOptions, Cluster, NodeLost, RemoteActor
from strop.environments.remote import (
    CallResult,
    EnvironmentDescription,
    EnvironmentServer,
    EnvironmentServerDied,
    Method,
    RemoteEnvironment,
    Transport,
    connect,
)

log = logging.getLogger(__name__)


class EnvironmentProcess:
    """One environment process, replaced by a new one when it dies."""

    def __init__(self, cluster: Cluster, options: ActorOptions, description: EnvironmentDescription) -> None:
        self.options = options
        self.restarts = 0
        self._cluster = cluster
        self._description = description
        self._starting = asyncio.Lock()
        self._remote: RemoteActor | None = None

    @property
    def transport(self) -> Transport:
        return Transport(self.call, self.call_sync)

    async def call(self, method: Method, arguments: tuple[Any, ...]) -> CallResult:
        """Call a method of the environment; start the process if it does not run. Raises ``EnvironmentServerDied``."""
        async with self._starting:
            if self._remote is None:
                with self._translate_spawn_errors():
                    self._remote = await self._cluster.spawn(self.options, EnvironmentServer, self._description)
        remote = self._remote
        try:
            reply: CallResult = await remote.call("answer", method, arguments)
            return reply
        except ActorDied as error:
            raise self._mark_dead(remote, error) from error

    def call_sync(self, method: Method, arguments: tuple[Any, ...]) -> CallResult:
        """Like ``call``, but block this thread."""
        if self._remote is None:
            with self._translate_spawn_errors():
                self._remote = self._cluster.spawn_sync(self.options, EnvironmentServer, self._description)
        remote = self._remote
        try:
            reply: CallResult = remote.start_call("answer", method, arguments)()
            return reply
        except ActorDied as error:
            raise self._mark_dead(remote, error) from error

    @contextmanager
    def _translate_spawn_errors(self) -> Iterator[None]:
        """Raise ``EnvironmentServerDied`` if the process cannot start. If its node is lost, let the next one start on any node."""
        try:
            yield
        except ActorDied as error:
            if isinstance(error, NodeLost):
                self.options = replace(self.options, node=None)
                log.warning("%s; the next process may start on any node", error)
            raise EnvironmentServerDied(str(error)) from error

    def _mark_dead(self, remote: RemoteActor, error: ActorDied) -> EnvironmentServerDied:
        if self._remote is remote:  # this caller is the first to notice
            self._remote = None
            self.restarts += 1
            log.warning("%s; another process takes its place", error)
        return EnvironmentServerDied(str(error))


def spawn_environments(
    cluster: Cluster, descriptions: Mapping[str, EnvironmentDescription], options: Mapping[str, tuple[ActorOptions, ...]]
) -> dict[str, RemoteEnvironment]:
    """Start environments in their processes and return them by alias. ``options``: of each process. Raises what making an environment
    raises."""
    environments: dict[str, RemoteEnvironment] = {}
    for alias, description in descriptions.items():
        transports = [EnvironmentProcess(cluster, each, description).transport for each in options[alias]]
        environments[alias] = connect(description, transports)
    return environments
