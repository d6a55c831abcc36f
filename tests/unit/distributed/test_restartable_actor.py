"""A process that is started once, noticed when it dies, and started again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from strop.distributed.base import ActorDied, ActorOptions, NodeLost
from strop.distributed.restartable_actor import RestartableActor
from strop.distributed.workers.environment_process import EnvironmentProcess
from strop.environments.remote import EnvironmentServerDied


class FakeRemote:
    """A ``RemoteActor`` in this process."""

    def __init__(self, made: Any) -> None:
        self.made = made
        self.dead = False

    def start_call(self, method: str, *arguments: Any) -> Callable[[], Any]:
        def answer() -> Any:
            if self.dead:
                raise ActorDied("worker-0 is gone")
            return getattr(self.made, method)(*arguments)

        return answer

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        return asyncio.to_thread(self.start_call(method, *arguments))


class FakeCluster:
    """Makes objects in this process. ``failures`` are raised by the next starts."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.remotes: list[FakeRemote] = []
        self.nodes: list[int | None] = []

    def spawn_sync(self, options: ActorOptions, make: Callable[..., Any], *arguments: Any) -> Any:
        self.nodes.append(options.node)
        if self.failures:
            raise self.failures.pop(0)
        self.remotes.append(FakeRemote(make(*arguments)))
        return self.remotes[-1]

    async def spawn(self, options: ActorOptions, make: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(0.01)
        return self.spawn_sync(options, make, *arguments)


def actor_on(cluster: Any) -> RestartableActor:
    return RestartableActor(cluster, ActorOptions(name="worker-0", node=1), list, (3, 1, 3))


def test_concurrent_first_calls_start_one_process() -> None:
    cluster = FakeCluster()
    actor = actor_on(cluster)

    async def call() -> list[int]:
        return await asyncio.gather(*(actor.call("count", 3) for _ in range(4)))

    assert asyncio.run(call()) == [2] * 4 and len(cluster.remotes) == 1 and actor.restarts == 0


def test_a_dead_process_is_replaced_at_the_next_call_and_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    cluster = FakeCluster()
    actor = actor_on(cluster)

    async def call() -> tuple[list[Any], int]:
        await actor.start()
        cluster.remotes[0].dead = True
        failed = await asyncio.gather(*(actor.call("count", 3) for _ in range(3)), return_exceptions=True)
        return failed, await actor.call("count", 3)

    with caplog.at_level(logging.WARNING):
        failed, found = asyncio.run(call())
    assert all(isinstance(error, ActorDied) for error in failed) and found == 2
    assert actor.restarts == 1 and len(cluster.remotes) == 2
    assert [record.getMessage() for record in caplog.records] == ["worker-0 is gone; another process takes its place"]


def test_blocking_calls_restart_it_too() -> None:
    cluster = FakeCluster()
    actor = actor_on(cluster)
    assert actor.call_sync("count", 3) == 2
    cluster.remotes[0].dead = True
    with pytest.raises(ActorDied, match="worker-0 is gone"):
        actor.call_sync("count", 3)
    assert actor.call_sync("count", 1) == 1 and actor.restarts == 1


def test_what_the_object_raises_does_not_restart_its_process() -> None:
    cluster = FakeCluster()
    actor = actor_on(cluster)
    with pytest.raises(ValueError, match="not in list"):
        actor.call_sync("index", 7)
    assert actor.restarts == 0 and actor.remote is cluster.remotes[0]


class Answers:
    def answer(self, method: str, arguments: tuple[Any, ...]) -> str:
        return f"{method} {arguments}"


@pytest.mark.parametrize("blocking", [False, True])
def test_an_environment_whose_node_is_lost_may_start_on_any_node(blocking: bool) -> None:
    cluster: Any = FakeCluster(NodeLost("its node 10.0.0.2 has left the cluster"))
    process = EnvironmentProcess(RestartableActor(cluster, ActorOptions(name="environment-0", node=1), Answers))

    def call() -> Any:
        return process.call_sync("spec", ()) if blocking else asyncio.run(process.call("spec", ()))

    with pytest.raises(EnvironmentServerDied, match="has left the cluster"):
        call()
    assert call() == "spec ()" and cluster.nodes == [1, None]


def test_an_environment_that_dies_in_a_call_is_an_environment_that_died() -> None:
    cluster: Any = FakeCluster()
    process = EnvironmentProcess(RestartableActor(cluster, ActorOptions(name="environment-0", node=1), Answers))
    process.call_sync("spec", ())
    cluster.remotes[0].dead = True
    with pytest.raises(EnvironmentServerDied, match="worker-0 is gone"):
        process.call_sync("spec", ())
    assert process.call_sync("spec", ()) == "spec ()" and cluster.nodes == [1, 1]
