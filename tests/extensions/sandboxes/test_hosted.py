"""Services that make sandboxes: none was ever reached. Servers of their APIs stand in for them, which their own clients also speak to."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from strop.extensions.sandboxes import daytona_provider
from strop.extensions.sandboxes.base import (
    FailureCause,
    NetworkPolicy,
    Sandbox,
    SandboxCommand,
    SandboxFailure,
    SandboxProvider,
    SandboxSpec,
    UnsupportedSpec,
)
from strop.extensions.sandboxes.conformance import CHECKS, check_provider
from strop.extensions.sandboxes.daytona_provider import DaytonaOptions, DaytonaProvider
from strop.extensions.sandboxes.e2b_provider import E2BOptions, E2BProvider
from strop.extensions.sandboxes.local.local_provider import LocalProvider
from strop.extensions.sandboxes.modal_provider import ModalProvider
from support.adapter_servers import interpreter
from support.fake_daytona import FakeDaytona
from support.fake_e2b import FakeE2B
from support.fake_modal import EXCEPTIONS, FakeModal
from support.oci_images import link, make_layer, programs_layer, write_layout

MakeLocal = Callable[[], LocalProvider]
SERVICES = ("e2b", "daytona", "modal")
LEFT_OUT = {"a full disk is an error of the program", "a fork bomb is contained", "a command runs as the user that is set"}
RECORDED = json.loads((Path(__file__).parents[2] / "fixtures" / "sandbox_requests.json").read_text())


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("E2B_API_KEY", "k3y")
    monkeypatch.setenv("DAYTONA_API_KEY", "k3y")
    monkeypatch.setattr(daytona_provider, "POLL_S", 0.02)
    yield
    sys.modules.pop("modal", None)


@asynccontextmanager
async def service(name: str, local: LocalProvider, images: dict[str, str]) -> AsyncIterator[tuple[Any, Any]]:
    """Yield a stand-in for a service, and a provider that uses it."""
    if name == "modal":
        stand_in: Any = FakeModal(local, images)
        sys.modules["modal"] = stand_in
        yield stand_in, ModalProvider()
        await local.close()
        return
    async with (FakeE2B if name == "e2b" else FakeDaytona)(local, images) as server:
        options: Any = {
            "e2b": E2BOptions(api_url=server.url, sandbox_url=server.url),
            "daytona": DaytonaOptions(api_url=f"{server.url}/api"),
        }
        provider = (E2BProvider if name == "e2b" else DaytonaProvider)(options[name])
        yield server, provider
        await provider.close()


def use(name: str, local: LocalProvider, image: str, work: Callable[[Any, Any], Any]) -> None:
    async def run() -> None:
        async with service(name, local, {"box:1": image}) as (server, provider):
            await work(server, provider)
            await provider.close()
            assert server.made == {}

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["e2b", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in SERVICES[1:])])
def test_a_service_keeps_the_protocol(make_local: MakeLocal, image: str, name: str):
    async def work(server: Any, provider: SandboxProvider) -> None:
        results = await check_provider(provider, "box:1")
        assert {result.name: result.error for result in results if result.error} == {}
        assert {result.name for result in results if result.error is None} == LEFT_OUT and len(results) == len(CHECKS)

    use(name, make_local(), image, work)


REFUSED = {
    "e2b": [(429, FailureCause.THROTTLED), (404, FailureCause.IMAGE), (401, FailureCause.REFUSED), (507, FailureCause.DISK)],
    "daytona": [(429, FailureCause.THROTTLED), (400, FailureCause.IMAGE), (403, FailureCause.REFUSED)],
    "modal": [("ResourceExhaustedError", FailureCause.THROTTLED), ("RemoteError", FailureCause.IMAGE),
              ("ConnectionError", FailureCause.REFUSED)],
}  # fmt: skip


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_refuses_has_a_cause_and_what_killed_runs_left_is_removed(make_local: MakeLocal, image: str, name: str):
    async def work(server: Any, provider: Any) -> None:
        for status, cause in REFUSED[name]:
            server.refuses = [EXCEPTIONS[status]("why") if isinstance(status, str) else (status, {"message": "why"})]
            with pytest.raises(SandboxFailure, match="why") as found:
                await provider.create(SandboxSpec(image="box:1"))
            assert found.value.cause == cause and server.made == {}
            assert status != 429 or found.value.retry_after_s == 7
        ended = provider.owner.rsplit(":", 2)[0] + ":4194304:17"
        spec = SandboxSpec(image="box:1", network=NetworkPolicy(egress="allow", hosts=("a.b",)))
        own, provider.owner = provider.owner, ended
        for _ in range(2):
            await provider.create(spec)
        provider.owner = own
        kept = await provider.create(SandboxSpec(image="box:1"))
        assert await provider.remove_left_over() == 2 and set(server.made) == {kept.id}

    use(name, make_local(), image, work)


def test_a_sandbox_that_never_starts_is_destroyed(make_local: MakeLocal, image: str):
    async def work(server: FakeDaytona, provider: DaytonaProvider) -> None:
        for state, cause in (
            ({"state": "error", "errorReason": "no runner is available"}, FailureCause.REFUSED),
            ({"state": "build_failed", "errorReason": "failed to pull"}, FailureCause.IMAGE),
        ):
            server.states = [state]
            with pytest.raises(SandboxFailure, match=state["errorReason"]) as found:
                await provider.create(SandboxSpec(image="box:1"))
            assert found.value.cause == cause and server.made == {}

    use("daytona", make_local(), image, work)


def test_without_a_key_or_the_package_nothing_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("E2B_API_KEY")
    with pytest.raises(UnsupportedSpec, match="needs the key of your account in the environment variable E2B_API_KEY"):
        E2BProvider()
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(UnsupportedSpec, match="needs the package modal"):
        ModalProvider()


# A policy that is root in its sandbox may replace the daemon there. What comes out is then anything at all.
HOSTILE = [b"", b"\0\0\0\0\2{}", b"\0\xff\xff\xff\xffxx", b'\0\0\0\0\4"ab"', b'\0\0\0\0\x14{"event":{"end":[1]}}', b"\2\0\0\0\2{}",
           b'\0\0\0\0\x20{"event":{"data":{"stdout":"%"}}}', b'\0\0\0\0\x14{"event":{"start":1}}',
           b'\2\0\0\0\x17{"error":{"code":"what"}}']  # fmt: skip


def test_a_daemon_that_sends_anything_is_lost(make_local: MakeLocal, image: str):
    async def work(server: FakeE2B, provider: E2BProvider) -> None:
        sandbox = await provider.create(SandboxSpec(image="box:1"))
        app = web.Application()
        answers = iter(HOSTILE)

        async def answer(request: web.Request) -> web.Response:
            assert "X-API-KEY" not in request.headers, "the key of the account went into a sandbox"
            return web.Response(body=next(answers))

        app.router.add_post("/process.Process/Start", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        sandbox.daemon = f"http://127.0.0.1:{runner.addresses[0][1]}"
        for _ in HOSTILE:
            with pytest.raises(SandboxFailure) as found:
                result = await sandbox.exec(SandboxCommand(argv=("true",), stdin=b"x"))
                assert result.reason == "no result", result
            assert found.value.cause == FailureCause.LOST, found.value
        await runner.cleanup()

    use("e2b", make_local(), image, work)


# --- the services' own clients ------------------------------------------------------------------------------------------------


def list_requests(exchanges: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the keys of the body of each kind of request."""
    found: dict[str, set[str]] = {}
    for exchange in exchanges:
        path = re.sub(r"/(sandboxes|sandbox|toolbox|session|command|templates|snapshots)/[^/]+", r"/\1/NAME", exchange["path"])
        found.setdefault(f"{exchange['method']} {path}", set()).update(_keys(exchange["body"] or {}))
    return {name: sorted(keys) for name, keys in sorted(found.items()) if "socket.io" not in name}


def _keys(body: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in body.items():
        if isinstance(value, dict) and key not in ("env", "envVars", "envs", "labels", "metadata"):
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key


@pytest.mark.parametrize("name", ["e2b", "daytona"])
def test_each_request_is_one_that_the_services_own_client_sends(make_local: MakeLocal, image: str, name: str):
    async def work(server: Any, provider: Any) -> None:
        spec = SandboxSpec(image="box:1", environment={"A": "b"}, network=NetworkPolicy(egress="allow", hosts=("a.b",)))
        sandbox: Sandbox = await provider.create(spec)
        assert (await sandbox.exec(SandboxCommand(argv=("cat",), stdin=b"\0data"))).stdout == b"\0data"
        await sandbox.get_tree("/etc/passwd")
        await provider.remove_snapshot(await sandbox.snapshot())
        await provider.remove_left_over()
        await sandbox.destroy()
        own = list_requests(server.exchanges)
        assert set(own) <= set(RECORDED[name])
        assert set(server.images) == {"box:1"}
        assert {kind: set(keys) - set(RECORDED[name][kind]) for kind, keys in own.items()} == {kind: set() for kind in own}

    use(name, make_local(), image, work)


@pytest.mark.slow
@pytest.mark.parametrize("name, said", [("e2b", "[0, 'data', 'err\\n', 1]"), ("daytona", "[['err\\n', 'out\\n'], b'\\x00data']")])
def test_the_services_own_client_speaks_to_the_stand_in(make_local: MakeLocal, tmp_path: Path, name: str, said: str):
    python, script = interpreter("sandboxes"), Path(__file__).parents[2] / "support" / "official_sandbox_clients.py"
    image = write_layout(tmp_path, [programs_layer(), make_layer([link("bin/bash", "sh")])])

    async def work(server: Any, provider: Any) -> None:
        process = await asyncio.create_subprocess_exec(
            python, str(script), name, server.url, stdout=subprocess.PIPE, env={**os.environ, "HOME": str(tmp_path)}
        )
        assert (await process.communicate())[0].decode().strip() == said
        assert list_requests(server.exchanges) == RECORDED[name]

    use(name, make_local(), image, work)


@pytest.mark.slow
def test_what_is_called_of_modals_client_exists():
    script = """
import inspect, modal
used = {modal.Sandbox.create: "app image env tags timeout cpu memory block_network outbound_domain_allowlist", 
        modal.Sandbox.list: "app_id tags",
        modal.Sandbox.exec: "text", modal.Sandbox.terminate: "", modal.Sandbox.snapshot_filesystem: "timeout", modal.Sandbox.get_tags: "",
        modal.App.lookup: "create_if_missing"}
for function, names in used.items():
    assert not set(names.split()) - set(inspect.signature(function).parameters) and function.aio, function
assert "secret" in inspect.signature(modal.Image.from_registry).parameters and modal.Image.from_id and modal.Secret.from_name
assert modal.io_streams.StreamWriter.drain.aio and modal.io_streams.StreamWriter.write_eof
assert modal.container_process.ContainerProcess.wait.aio
for name in NAMES:
    assert issubclass(getattr(modal.exception, name), modal.exception.Error), name
"""
    names = ["NotFoundError", "SandboxTerminatedError", "SandboxTimeoutError", "ConflictError", "ClientClosed", "ResourceExhaustedError",
             "RemoteError", "ImageBuildError", "TimeoutError", "AuthError"]  # fmt: skip
    subprocess.run([interpreter("sandboxes"), "-c", script.replace("NAMES", str(names))], check=True)
