"""Groups of actors, and actors whose process is replaced."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from strop.distributed.actor_group import ActorGroup, ActorGroupDied, RestartableActor
from strop.distributed.base import ActorDied, ActorOptions, NodeLost
from strop.distributed.workers.environment_process import EnvironmentProcess
from strop.environments.remote import EnvironmentServerDied


class Member:
    """Answers, raises, or waits until it is killed."""

    pid: int | None = 1
    address = "here"

    def __init__(self, answer: Any = None, *, waits: bool = False) -> None:
        self.name = "member"
        self.alive = True
        self.answer = answer
        self.waits = waits
        self.killed = threading.Event()
        self.received: tuple[Any, ...] = ()

    def start_call(self, method: str, *arguments: Any, urgent: bool = False) -> Callable[[], Any]:
        def answer() -> Any:
            if self.waits:
                self.killed.wait(60)
                raise ActorDied("killed by its group")
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

        return answer

    def call(self, method: str, *arguments: Any, urgent: bool = False, **named: Any) -> Any:
        self.received = arguments
        return asyncio.to_thread(self.start_call(method))

    async def kill(self) -> None:
        self.killed.set()


def test_what_all_answer_comes_by_rank() -> None:
    group = ActorGroup("learner", [Member(1), Member(2)])
    assert group.call_all_sync("save") == [1, 2]
    assert asyncio.run(group.call_all("save")) == [1, 2]


def test_each_member_gets_arguments_of_its_own() -> None:
    members = [Member(1), Member(2)]
    group = ActorGroup("learner", members)
    assert asyncio.run(group.call_each("score", [("policy", "share 0"), ("policy", "share 1")])) == [1, 2]
    assert [member.received for member in members] == [("policy", "share 0"), ("policy", "share 1")]
    with pytest.raises(ValueError, match="shorter"):
        asyncio.run(group.call_each("score", [("policy", "share 0")]))


@pytest.mark.parametrize("peer", ["Connection closed by peer [127.0.0.1]:1234", "[gloo] Connection reset by peer"])
def test_the_dead_member_is_blamed_and_not_the_one_that_noticed(peer: str) -> None:
    group = ActorGroup("learner", [Member(RuntimeError(peer)), Member(ActorDied("learner-1 is gone"))])
    with pytest.raises(ActorGroupDied, match="learner-1 is gone"):
        group.call_all_sync("save")
    with pytest.raises(ActorGroupDied, match="learner-1 is gone"):
        group.call_all_sync("save")


def test_a_member_that_waits_for_a_dead_one_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.distributed.actor_group.ERROR_GRACE_SECONDS", 0.2)
    stuck = Member(waits=True)
    began = time.monotonic()
    with pytest.raises(ActorGroupDied, match="learner-1 is gone"):
        ActorGroup("learner", [stuck, Member(ActorDied("learner-1 is gone"))]).call_all_sync("save")
    assert time.monotonic() - began < 10
    stuck.killed.set()


def test_what_a_member_raises_by_itself_is_raised() -> None:
    group = ActorGroup("learner", [Member(OSError("no space left")), Member(1)])
    with pytest.raises(OSError, match="no space left"):
        group.call_all_sync("save")


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
