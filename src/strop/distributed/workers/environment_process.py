"""Environments in separate processes. A process that dies is replaced at the next call."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from strop.distributed.base import ActorDied, ActorOptions, Cluster, NodeLost
from strop.distributed.restartable_actor import RestartableActor
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

    def __init__(self, actor: RestartableActor) -> None:
        self.actor = actor

    async def call(self, method: Method, arguments: tuple[Any, ...]) -> CallResult:
        """Call a method of the environment; start the process if it does not run. Raises ``EnvironmentServerDied``."""
        with self._translate_errors():
            reply: CallResult = await self.actor.call("answer", method, arguments)
            return reply

    def call_sync(self, method: Method, arguments: tuple[Any, ...]) -> CallResult:
        """Like ``call``, but block this thread."""
        with self._translate_errors():
            reply: CallResult = self.actor.call_sync("answer", method, arguments)
            return reply

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise ``EnvironmentServerDied`` if the process died or cannot start. If its node is lost, the next one may start on any node."""
        try:
            yield
        except ActorDied as error:
            if isinstance(error, NodeLost):
                self.actor.options = replace(self.actor.options, node=None)
                log.warning("%s; the next process may start on any node", error)
            raise EnvironmentServerDied(str(error)) from error


def spawn_environments(
    cluster: Cluster, descriptions: Mapping[str, EnvironmentDescription], options: Mapping[str, Sequence[ActorOptions]]
) -> dict[str, RemoteEnvironment]:
    """Start environments in their processes and return them by alias. ``options``: of each process. Raises what making an environment
    raises."""
    environments: dict[str, RemoteEnvironment] = {}
    for alias, description in descriptions.items():
        actors = [RestartableActor(cluster, each, EnvironmentServer, description) for each in options[alias]]
        processes = [EnvironmentProcess(actor) for actor in actors]
        environments[alias] = connect(description, [Transport(process.call, process.call_sync) for process in processes])
    return environments
