"""Engines in other processes, as their user sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from strop.distributed.actor_group import RestartableActor
from strop.distributed.base import ActorDied, ActorOptions, NodeLost
from strop.distributed.workers.remote_engine import RemoteEngine
from strop.generation.pool import EnginePool
from strop.sampling import Sampling
from strop.weight_sync.base import EngineDied, EngineLost


class Process:
    """A ``RemoteActor`` whose object answers what it is told to."""

    name = "engine-0"
    pid = 1
    address = "here"

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = {"start": None, "close": None, "resume": None, "counters": {"running": 2.0}, **answers}
        self.asked: list[str] = []
        self.alive = True

    def call(self, method: str, *arguments: Any, urgent: bool = False, **named: Any) -> Awaitable[Any]:
        return self._answer(method)

    async def _answer(self, method: str) -> Any:
        self.asked.append(method)
        answer = self.answers[method]
        if isinstance(answer, ActorDied):
            self.alive = False
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def kill(self) -> None:
        self.asked.append("kill")
        self.alive = False


def engine(*processes: Process | Exception) -> RemoteEngine:
    waiting = list(processes)

    class Cluster:
        async def spawn(self, options: ActorOptions, make: Callable[..., Any]) -> Any:
            found = waiting.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

    cluster: Any = Cluster()
    return RemoteEngine("engine 0", 1, RestartableActor(cluster, ActorOptions(name="engine-0"), object))


def test_it_lives_from_its_start_to_its_end_and_takes_its_version_when_it_goes_on() -> None:
    process = Process({})
    remote = engine(process)
    assert not remote.alive and remote.version == -1

    async def live() -> None:
        await remote.start()
        assert remote.alive
        await remote.resume(4)
        assert remote.version == 4 and remote.counters() == {"running": 2.0}
        await remote.close()

    asyncio.run(live())
    assert not remote.alive and remote.version == -1 and process.asked[-2:] == ["close", "kill"]


@pytest.mark.parametrize("answer", [ActorDied("killed"), EngineDied("its inner process died")])
def test_a_process_that_is_gone_is_an_engine_that_died_and_starts_anew(answer: Exception) -> None:
    remote = engine(Process({"generate": answer}), Process({"generate": "fine"}))

    async def live() -> Any:
        await remote.start()
        with pytest.raises(EngineDied):
            await remote.generate([1], sampling=Sampling(), seed=1)
        assert not remote.alive
        await remote.start()
        return await remote.generate([1], sampling=Sampling(), seed=1)

    assert asyncio.run(live()) == "fine"


def test_a_lost_node_is_told_from_a_lost_process() -> None:
    with pytest.raises(EngineLost, match="has left"):
        asyncio.run(engine(NodeLost("its node has left the cluster")).start())


def replicas(shrinks: bool, revive: Callable[[Any], Awaitable[None]]) -> tuple[EnginePool, list[RemoteEngine]]:
    engines = [engine(Process({"generate": ActorDied("node lost")})), engine(Process({"generate": "from the other"}))]
    found = EnginePool(engines, allow_shrink=shrinks)
    found.restart_engine = revive
    return found, engines


async def never(_: Any) -> None:
    raise EngineLost("its node has left the cluster")


@pytest.mark.parametrize("shrinks", [True, False])
def test_requests_of_an_engine_whose_node_is_lost_go_to_the_others_where_that_is_configured(shrinks: bool) -> None:
    found, engines = replicas(shrinks, never)

    async def ask() -> list[Any]:
        for each in engines:
            await each.start()
        return list(
            await asyncio.gather(
                *(found.generate([number], sampling=Sampling(), seed=number) for number in range(4)), return_exceptions=True
            )
        )

    answers = asyncio.run(ask())
    if shrinks:
        assert answers == ["from the other"] * 4 and found.collect_metrics()["generation/engines"] == 1
        assert found.drop(engines[0]) and not found.drop(engines[1]), "the last one is not done without"
    else:
        assert any(isinstance(answer, EngineLost) for answer in answers)
