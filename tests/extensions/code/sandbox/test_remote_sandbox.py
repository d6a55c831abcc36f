"""``strop sandbox serve`` and its client: the same results, keys, limits, and services that die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from strop.endings import Ending
from strop.extensions.code.sandbox import remote_sandbox
from strop.extensions.code.sandbox.base import ExitReason, Limits, Program, RunResult, SandboxError
from strop.extensions.code.sandbox.remote_sandbox import RemoteSandbox
from strop.extensions.code.sandbox.sandbox_config import SandboxConfig
from strop.extensions.code.sandbox.sandbox_pool import SandboxPool
from strop.extensions.code.sandbox.sandbox_server import SandboxServer, ServerOptions

KEY = "a key for tests"


class Service:
    """A process of ``strop sandbox serve``."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        key = folder / "key"
        key.write_text(KEY + "\n")
        command = [sys.executable, "-m", "strop", "sandbox", "serve", "--port", "0", "--workers", "2", "--api-key-file", str(key)]
        self.process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("service"), "--max-request-mb", "1", "--max-memory-mb", "300")
    yield service
    assert service.stop() == 0


def ask(url: str, path: str, body: Any = None, key: str = KEY) -> tuple[int, Any]:
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_programs_and_sessions_run_as_they_do_here(service: Service) -> None:
    async def work() -> None:
        sandbox = RemoteSandbox([service.url], KEY)
        result = await sandbox.run(Program(source="print(input(), open('a').read())", stdin="x", files={"a": "y"}))
        assert (result.stdout, result.reason) == ("x y\n", ExitReason.EXIT)
        results = await asyncio.gather(*(sandbox.run(Program(source=f"print({n})")) for n in range(20)))
        assert [result.stdout for result in results] == [f"{n}\n" for n in range(20)]
        async with sandbox.session() as session:
            await session.run("x = 4")
            assert (await session.run("x")).stdout == "4\n"
            assert (await session.run("while True: pass", wall_s=0.2)).reason == ExitReason.TIME
            assert "NameError" in (await session.run("x")).stderr
        with pytest.raises(ValueError, match="no language 'cobol'"):
            await sandbox.run(Program(source="", language="cobol"))
        with pytest.raises(ValueError, match=r"memory_mb is 400, and this service allows 300.*--max-memory-mb"):
            await sandbox.run(Program(source="", limits=Limits(memory_mb=400)))
        await sandbox.close()

    asyncio.run(work())
    assert ask(service.url, "/health")[1]["sessions"] == 0


def test_a_wrong_key_and_requests_that_are_none_are_refused(service: Service) -> None:
    assert ask(service.url, "/v1/run", {"source": ""}, key="wrong")[0] == 401
    assert ask(service.url, "/v1/sessions", {}, key="")[0] == 401
    assert ask(service.url, "/v1/run", b"x" * (2 << 20))[0] == 413
    assert ask(service.url, "/v1/run", b"no json")[0] == 422
    assert ask(service.url, "/v1/run", {"source": 3})[0] == 422
    assert ask(service.url, "/v1/run", {"source": "", "limits": {"memory_mb": "9"}})[0] == 422
    assert ask(service.url, "/v1/run", {"source": "", "other": 1})[0] == 422
    assert ask(service.url, "/v1/sessions/none/run", {"source": "", "wall_s": 1})[0] == 404
    assert ask(service.url, "/nothing", {})[0] == 404
    status, health = ask(service.url, "/health", key="wrong")
    assert (status, health["status"], health["level"]) == (200, "ok", "namespaces")

    async def work() -> None:
        with pytest.raises(SandboxError, match="refused the key in STROP_SANDBOX_API_KEY"):
            await RemoteSandbox([service.url], "wrong").run(Program(source=""))

    asyncio.run(work())


def test_a_dead_service_is_skipped_and_a_session_in_it_begins_anew(service: Service, tmp_path: Path) -> None:
    dying = Service(tmp_path)

    async def work() -> None:
        sandbox = RemoteSandbox([dying.url, service.url], KEY)
        sessions = [sandbox.session(), sandbox.session()]
        one, two = [await session.__aenter__() for session in sessions]
        await asyncio.gather(one.run("x = 1"), two.run("x = 1"))
        dying.process.kill()
        dying.process.wait()
        found = await asyncio.gather(one.run("x"), two.run("x"), return_exceptions=True)
        (kept,), (lost,) = ([each for each in found if isinstance(each, kind)] for kind in (RunResult, SandboxError))
        assert kept.stdout == "1\n" and str(lost) == remote_sandbox.LOST and lost.ending == Ending.SANDBOX
        again = await asyncio.gather(one.run("2"), two.run("2"))
        assert [result.stdout for result in again] == ["2\n", "2\n"]
        assert all(result.succeeded for result in await asyncio.gather(*(sandbox.run(Program(source="")) for _ in range(6))))
        for session in sessions:
            await session.__aexit__(None, None, None)

    asyncio.run(work())


def test_no_service_at_all_is_told_once_and_an_error_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_sandbox, "RETRY_S", 0.5)
    monkeypatch.setattr(remote_sandbox, "QUIET_S", 0.1)

    async def work() -> list[Any]:
        sandbox = RemoteSandbox(["http://127.0.0.1:9"], KEY)
        return await asyncio.gather(*(sandbox.run(Program(source="")) for _ in range(4)), return_exceptions=True)

    for error in asyncio.run(work()):
        assert (
            isinstance(error, SandboxError)
            and "no service of sandbox.url has answered for 0.5 s" in str(error)
            and error.ending == Ending.SANDBOX
        )
    (told,) = caplog.messages
    assert "programs wait. The last: http://127.0.0.1:9: ConnectionRefusedError" in told


def test_a_busy_service_is_asked_again(tmp_path: Path) -> None:
    busy = Service(tmp_path, "--max-waiting", "1", "--workers", "1")

    async def work() -> list[str]:
        sandbox = RemoteSandbox([busy.url], KEY)
        results = await asyncio.gather(*(sandbox.run(Program(source=f"print({n})")) for n in range(12)))
        return [result.stdout for result in results]

    assert asyncio.run(work()) == [f"{n}\n" for n in range(12)]
    assert busy.stop() == 0


def test_a_service_or_a_client_without_a_key_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STROP_SANDBOX_API_KEY", raising=False)
    process = subprocess.run(
        [sys.executable, "-m", "strop", "sandbox", "serve"], capture_output=True, text=True, env=dict(os.environ)
    )
    assert process.returncode == 2
    assert "STROP_SANDBOX_API_KEY" in process.stderr
    with pytest.raises(SandboxError, match="STROP_SANDBOX_API_KEY"):
        RemoteSandbox(["http://127.0.0.1:9"])


def test_odd_headers_deep_json_and_too_many_interpreters_are_answered_with_a_status_of_their_own() -> None:
    async def work() -> None:
        server = SandboxServer(SandboxPool(SandboxConfig(sessions=1)), ServerOptions(api_key=KEY))
        async with TestClient(TestServer(server.make_app())) as client:
            key = {"Authorization": f"Bearer {KEY}"}
            for path, body, headers, status in (
                ("/v1/run", b"[" * 100_000, key, 422),
                ("/v1/run", b"\xff", key, 422),
                ("/v1/run", b"{}", {"Authorization": "Bearer schl\udcffssel"}, 401),
                ("/v1/run", b'{"source": ""}', {**key, "Content-Type": "application/json; charset=bogus"}, 200),
                ("/v1/run", b'{"source": ""}', {**key, "Origin": "http://evil.example"}, 403),
                ("/v1/sessions", b"{}", key, 200),
                ("/v1/sessions", b"{}", key, 503),
            ):
                answer = await client.post(path, data=body, headers=headers)
                assert answer.status == status, (path, body[:20], headers, await answer.text())

    asyncio.run(work())
