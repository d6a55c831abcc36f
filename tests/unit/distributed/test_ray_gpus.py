"""Processes with GPUs besides those of the run, on a node that says it has two (nothing here computes on them)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.unit.distributed.things import Thing

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")

from strop.distributed.base import ActorOptions
from strop.distributed.cluster_config import ClusterConfig
from strop.distributed.placement import PlacementError
from strop.distributed.ray import connect

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(120), pytest.mark.usefixtures("workers_are_forks")]

VARIABLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture
def two_gpus() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    os.environ["RAY_AUTH_MODE"] = "disabled"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2, "include_dashboard": False})
    yield cluster.address
    cluster.shutdown()


def test_ray_finds_gpus_outside_of_the_run_and_it_is_said_when_there_are_none(two_gpus: str) -> None:
    async def run() -> list[str]:
        config = ClusterConfig(address=two_gpus, wait_seconds=20)
        cluster = await connect(config, on_cpu=False)
        try:
            own = await cluster.spawn(ActorOptions(name="learner-0", node=0, devices=(0,)), Thing, 1)
            sees_none = await cluster.spawn(ActorOptions(name="environment-0", node=0), Thing, 1)
            halves = [await cluster.spawn(ActorOptions(name=f"teacher-{n}", num_gpus=0.5), Thing, n) for n in range(2)]
            seen = [await each.call("environment", VARIABLE) for each in (own, sees_none, *halves)]
            cluster.config = replace(config, wait_seconds=2)
            for start in (cluster.spawn, in_thread(cluster.spawn_sync)):
                with pytest.raises(PlacementError, match=r"teacher-9 needs 1 GPUs in addition .*cluster.wait_seconds"):
                    await start(ActorOptions(name="teacher-9", num_gpus=1.0), Thing, 9)
            return seen
        finally:
            await cluster.close()

    own, nothing, first, second = asyncio.run(run())
    assert nothing == "" and {own, first} == {"0", "1"} and first == second


def in_thread(call):
    async def started(*arguments):
        return await asyncio.to_thread(call, *arguments)

    return started


@pytest.mark.parametrize("inherited", ["6,7", "GPU-8932f937-d72c,GPU-1b2c3d4e-0a0b"])
def test_processes_of_a_run_have_the_gpus_that_the_node_was_given(inherited: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, inherited)
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    node = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2, "include_dashboard": False})

    async def run() -> list[str]:
        cluster = await connect(ClusterConfig(address=node.address, wait_seconds=20, gpus_per_node=2), on_cpu=False)
        try:
            slots = [(0,), (1,), (0, 1)]
            actors = [await cluster.spawn(ActorOptions(name=f"a-{n}", node=0, devices=s), Thing, n) for n, s in enumerate(slots)]
            return [await actor.call("environment", VARIABLE) for actor in actors]
        finally:
            await cluster.close()

    try:
        first, second, both = asyncio.run(run())
    finally:
        node.shutdown()
    assert {first, second} == set(inherited.split(",")) and both == f"{first},{second}"
