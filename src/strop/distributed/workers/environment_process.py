"""Environments in separate processes. A process that dies is replaced at the next call."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from strop.distributed.actor_group import RestartableActor
from strop.distributed.base import ActorDied, Cluster, NodeLost, spread_over_nodes
from strop.distributed.cluster_config import RoleConfig
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
    cluster: Cluster, descriptions: Mapping[str, EnvironmentDescription], count: int, role: RoleConfig
) -> dict[str, RemoteEnvironment]:
    """Start each environment in ``count`` processes, spread over the nodes, and return them by alias. Raises what making an environment
    raises."""
    num_gpus = 0.0 if cluster.on_cpu else role.num_gpus or 0.0
    environments: dict[str, RemoteEnvironment] = {}
    for alias, description in descriptions.items():
        names = [f"environment-{alias}-{number}" for number in range(count)]
        options = spread_over_nodes(names, cluster.num_nodes, role, {"OMP_NUM_THREADS": "1"}, num_gpus=num_gpus, kind="async")
        actors = [RestartableActor(cluster, each, EnvironmentServer, description) for each in options]
        processes = [EnvironmentProcess(actor) for actor in actors]
        environments[alias] = connect(description, [Transport(process.call, process.call_sync) for process in processes])
    return environments
