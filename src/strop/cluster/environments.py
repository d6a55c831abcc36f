"""Environments in processes of their own. One that dies is replaced at the next call."""

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
    """The place of one process: whoever lives in it answers."""

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
        """Raises ``hosted.HostDied``."""
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
        """The same, with everything in this process standing still."""
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
        """One that does not come up died as well. Where its node is lost the next one goes to any other."""
        try:
            yield
        except HostDied as error:
            if isinstance(error, NodeLost):
                self.options = replace(self.options, node=None)
                log.warning("%s; the next one may live on any node", error)
            raise hosted.HostDied(str(error)) from error

    def _dead(self, remote: Remote, error: HostDied) -> hosted.HostDied:
        if self._remote is remote:  # the first of its callers to notice
            self._remote = None
            self.restarts += 1
            log.warning("%s; another process takes its place", error)
        return hosted.HostDied(str(error))


def host_environments(
    cluster: Cluster, descriptions: Mapping[str, HostedDescription], options: Mapping[str, tuple[HostOptions, ...]]
) -> dict[str, RemoteEnvironment]:
    """By alias; ``options`` are those of each process. Raises what making an environment raised."""
    found: dict[str, RemoteEnvironment] = {}
    for alias, description in descriptions.items():
        links = [EnvironmentProcess(cluster, each, description).link for each in options[alias]]
        found[alias] = hosted.connect(description, links)
    return found
