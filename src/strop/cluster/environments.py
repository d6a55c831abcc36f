"""Environments in processes of their own. A process that dies is replaced at the next call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from strop.cluster.base import Cluster, HostDied, HostOptions, NodeLost, Remote
from strop.environments import hosted
from strop.environments.hosted import EnvironmentHost, HostedDescription, Link, Method, RemoteEnvironment, Reply

log = logging.getLogger(__name__)


class EnvironmentProcess:
    """One environment process, replaced by a new one when it dies."""

    def __init__(self, cluster: Cluster, options: HostOptions, description: HostedDescription) -> None:
        self.options = options
        self.restarts = 0
        self._cluster = cluster
        self._description = description
        self._starting = asyncio.Lock()
        self._remote: Remote | None = None

    @property
    def link(self) -> Link:
        return Link(self.call, self.blocking)

    async def call(self, method: Method, arguments: tuple[Any, ...]) -> Reply:
        """Call a method of the environment; start the process if it does not run. Raises ``remote.EnvironmentServerDied``."""
        async with self._starting:
            if self._remote is None:
                with self._placing():
                    self._remote = await self._cluster.host(self.options, EnvironmentHost, self._description)
        remote = self._remote
        try:
            reply: Reply = await remote.call("answer", method, arguments)
            return reply
        except HostDied as error:
            raise self._dead(remote, error) from error

    def blocking(self, method: Method, arguments: tuple[Any, ...]) -> Reply:
        """Like ``call``, but block this thread."""
        if self._remote is None:
            with self._placing():
                self._remote = self._cluster.host_now(self.options, EnvironmentHost, self._description)
        remote = self._remote
        try:
            reply: Reply = remote.wait("answer", method, arguments)()
            return reply
        except HostDied as error:
            raise self._dead(remote, error) from error

    @contextmanager
    def _placing(self) -> Iterator[None]:
        """Raise ``remote.EnvironmentServerDied`` if the process cannot start. If its node is lost, let the next one start on any node."""
        try:
            yield
        except HostDied as error:
            if isinstance(error, NodeLost):
                self.options = replace(self.options, node=None)
                log.warning("%s; the next process may start on any node", error)
            raise hosted.HostDied(str(error)) from error

    def _dead(self, remote: Remote, error: HostDied) -> hosted.HostDied:
        if self._remote is remote:  # this caller is the first to notice
            self._remote = None
            self.restarts += 1
            log.warning("%s; another process takes its place", error)
        return hosted.HostDied(str(error))


def host_environments(
    cluster: Cluster, descriptions: Mapping[str, HostedDescription], options: Mapping[str, tuple[HostOptions, ...]]
) -> dict[str, RemoteEnvironment]:
    """Start environments in their processes and return them by alias. ``options``: of each process. Raises what making an environment
    raises."""
    found: dict[str, RemoteEnvironment] = {}
    for alias, description in descriptions.items():
        links = [EnvironmentProcess(cluster, each, description).link for each in options[alias]]
        found[alias] = hosted.connect(description, links)
    return found
