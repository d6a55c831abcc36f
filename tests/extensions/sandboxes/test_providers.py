"""Providers keep the protocol: bubblewrap really, the others against small servers of their APIs with real sandboxes behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from strop.extensions.sandboxes.base import (
    FailureCause,
    Network,
    SandboxFailure,
    SandboxProvider,
    SandboxSpec,
    Unsupported,
)
from strop.extensions.sandboxes.conformance import CHECKS, check_provider
from strop.extensions.sandboxes.docker_provider import DockerOptions, DockerProvider
from strop.extensions.sandboxes.local.local_provider import LocalProvider
from support.fake_docker import Answer, FakeDocker

MakeLocal = Callable[[], LocalProvider]


async def check_all(provider: SandboxProvider, image: str, left_out: set[str]) -> None:
    results = await check_provider(provider, image)
    assert {result.name: result.error for result in results if result.error} == {}
    assert {result.name for result in results if result.error is None} == left_out and len(results) == len(CHECKS)


@pytest.mark.slow
def test_bubblewrap_keeps_the_protocol(make_local: MakeLocal, image: str):
    async def work() -> None:
        provider = make_local()
        await check_all(provider, image, set())
        await provider.close()

    asyncio.run(work())


@pytest.mark.slow
def test_docker_keeps_the_protocol(make_local: MakeLocal, image: str, socket_path: Path):
    async def work() -> None:
        async with FakeDocker(socket_path, make_local(), {"box:1": image}) as daemon:
            provider = DockerProvider(DockerOptions(socket=str(socket_path)))
            await check_all(provider, "box:1", {"a full disk is an error of the program"})
            await provider.close()
            assert daemon.containers == {}

    asyncio.run(work())


def test_docker_gives_a_container_few_rights_and_removes_those_of_ended_runs(
    make_local: MakeLocal, image: str, socket_path: Path
):
    async def work() -> None:
        async with FakeDocker(socket_path, make_local(), {"box:1": image}) as daemon:
            provider = DockerProvider(DockerOptions(socket=str(socket_path)))
            await provider.create(SandboxSpec(image="box:1", environment={"A": "b"}))
            (values,) = daemon.containers.values()
            host = values["HostConfig"]
            assert host["CapDrop"] == ["ALL"] and host["SecurityOpt"] == ["no-new-privileges"] and host["NetworkMode"] == "none"
            assert host["Memory"] == host["MemorySwap"] == 2048 << 20 and host["PidsLimit"] == 256 and values["Env"] == ["A=b"]
            ended = provider.owner.rsplit(":", 2)[0] + ":4194304:17"
            daemon.containers["old"] = {"Labels": {"strop.sandbox": ended}}
            daemon.containers["elsewhere"] = {"Labels": {"strop.sandbox": "other:4194304:17"}}
            assert (
                await provider.remove_left_over() == 1
                and set(daemon.containers) >= {"elsewhere"}
                and "old" not in daemon.containers
            )
            await provider.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    "answer, cause",
    [
        (Answer(500, "write /var: no space left on device"), FailureCause.DISK),
        (Answer(429, "slow down"), FailureCause.THROTTLED),
        (Answer(500, "cannot allocate memory"), FailureCause.REFUSED),
    ],
)
def test_what_docker_refuses_has_a_cause_and_leaves_nothing(make_local: MakeLocal, image: str, socket_path: Path, answer, cause):
    async def work() -> None:
        async with FakeDocker(socket_path, make_local(), {"box:1": image}) as daemon:
            daemon.refuses = [answer]
            provider = DockerProvider(DockerOptions(socket=str(socket_path)))
            with pytest.raises(SandboxFailure) as found:
                await provider.create(SandboxSpec(image="box:1"))
            assert found.value.cause == cause and daemon.containers == {}

    asyncio.run(work())


def test_a_daemon_that_is_not_there_and_a_policy_it_cannot_keep_are_refused(socket_path: Path):
    provider = DockerProvider(DockerOptions(socket=str(socket_path)))
    with pytest.raises(SandboxFailure, match="does not answer at") as found:
        asyncio.run(provider.create(SandboxSpec(image="box:1")))
    assert found.value.cause == FailureCause.REFUSED and found.value.ending == "sandbox"
    with pytest.raises(Unsupported, match="has no network egress=allow; set one of all, none"):
        asyncio.run(provider.create(SandboxSpec(image="box:1", network=Network(egress="allow", hosts=("a.b",)))))
