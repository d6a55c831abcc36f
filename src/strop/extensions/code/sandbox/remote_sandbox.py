"""Programs run by services of ``strop sandbox serve``, for any thread and event loop."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import logging
import os
import random
import ssl
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from strop.extensions.code.sandbox.base import ExitReason, Limits, Program, RunResult, SandboxError
from strop.safety.printable import redact_text

log = logging.getLogger(__name__)

API_KEY_VARIABLE = "STROP_SANDBOX_API_KEY"
REQUESTS = 128  # at a time in each process
QUIET_S = 10.0  # after which waiting for a service is worth a warning
RETRY_S = 60.0  # how long a request is tried again where all services are busy or dead
PAUSE_S = 10.0  # how long a service that could not be reached is left out
GRACE_S = 60.0  # for a request to wait in the service, and for a compiler, after the program's limit
LOST = "an interpreter was lost with its service, and its variables with it; set up more than one address in sandbox.url to start others"
DEFAULT_LIMITS = Limits()


class Unavailable(Exception):
    """A service cannot be reached, or is busy; another, or the same one later, may answer."""


class SessionGone(Exception):
    """A service does not know a session any more."""


class RemoteSandbox:
    """A sandbox behind one HTTP service or several, which share the load."""

    def __init__(self, urls: Sequence[str], api_key: str | None = None) -> None:
        self.urls = tuple(redact_text(url.rstrip("/")) for url in urls)  # a login in it has no use, and they stand in messages
        self._key = api_key or os.environ.get(API_KEY_VARIABLE, "")
        if not self._key:
            raise SandboxError(
                f"sandbox.url is set, and the key of the service is not: set the environment variable {API_KEY_VARIABLE}"
            )
        self._threads = ThreadPoolExecutor(REQUESTS, thread_name_prefix="remote_sandbox")
        self._turns = itertools.count(os.getpid())
        self._paused: dict[str, float] = {}  # until when
        self._warned = float("-inf")  # when programs were last said to wait
        self._lock = threading.Lock()

    async def run(self, program: Program) -> RunResult:
        body = {**asdict(program), "files": dict(program.files)}
        timeout = 2 * program.limits.wall_s + GRACE_S
        answer, _ = await self._call_any("/v1/run", body, timeout)
        return read_result(answer)

    @asynccontextmanager
    async def session(self, language: str = "python", limits: Limits = DEFAULT_LIMITS) -> AsyncIterator[RemoteSession]:
        session = RemoteSession(self, language, limits)
        try:
            yield session
        finally:
            await asyncio.shield(session.end())

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call_any(self, path: str, body: Mapping[str, Any], timeout_s: float) -> tuple[dict[str, Any], str]:
        """Ask the services in turn until one answers. Returns the answer and its address."""
        begun, wait, why = time.monotonic(), 0.05, ""
        while True:
            for url in self._order():
                try:
                    return await self.call(url, "POST", path, body, timeout_s), url
                except Unavailable as error:
                    why = f"{url}: {error}"
            self._warn(time.monotonic() - begun, why)
            if time.monotonic() + wait > begun + RETRY_S:
                raise SandboxError(f"no service of sandbox.url has answered for {RETRY_S:g} s; the last: {why}")
            await asyncio.sleep(wait * random.uniform(0.5, 1.5))
            wait = min(2 * wait, 2.0)

    def _warn(self, waited_s: float, why: str) -> None:
        """Say that programs wait for a service, at most once in a while: what waits is silent otherwise."""
        now = time.monotonic()
        with self._lock:
            if waited_s < QUIET_S or now < self._warned + RETRY_S:
                return
            self._warned = now
        log.warning("no service of sandbox.url has answered for %.0f s; programs wait. The last: %s", waited_s, why)

    def _order(self) -> list[str]:
        first = next(self._turns) % len(self.urls)
        turned = [*self.urls[first:], *self.urls[:first]]
        now = time.monotonic()
        with self._lock:
            return [url for url in turned if self._paused.get(url, 0.0) <= now] or turned

    async def call(self, url: str, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._request, url, method, path, body, timeout_s)

    def _request(self, url: str, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        try:
            connection.request(method, parts.path + path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            status, text = response.status, response.read()
        except ssl.SSLCertVerificationError as error:
            raise SandboxError(f"the service {url} has no valid certificate: {error}") from error
        except (TimeoutError, OSError, http.client.HTTPException) as error:
            with self._lock:
                self._paused[url] = time.monotonic() + PAUSE_S
            raise Unavailable(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        return _read_answer(url, status, text)


class RemoteSession:
    """An interpreter in a service. Where that was lost a call fails, and the next one begins a new interpreter, perhaps elsewhere."""

    def __init__(self, sandbox: RemoteSandbox, language: str, limits: Limits) -> None:
        self._sandbox, self._limits, self._language = sandbox, limits, language
        self._place: tuple[str, str] | None = None  # service, session

    async def run(self, source: str, *, wall_s: float | None = None) -> RunResult:
        wall = self._limits.wall_s if wall_s is None else wall_s
        if self._place is None:
            body = {"language": self._language, "limits": asdict(self._limits)}
            answer, url = await self._sandbox._call_any("/v1/sessions", body, GRACE_S)
            self._place = (url, answer["id"])
        url, name = self._place
        try:
            call = {"source": source, "wall_s": wall}
            return read_result(await self._sandbox.call(url, "POST", f"/v1/sessions/{name}/run", call, wall + GRACE_S))
        except (Unavailable, SessionGone) as error:
            self._place = None
            raise SandboxError(LOST) from error

    async def end(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            try:
                await self._sandbox.call(place[0], "DELETE", f"/v1/sessions/{place[1]}", None, GRACE_S)
            except (Unavailable, SessionGone):
                return  # its service ends it by itself


def read_result(answer: Mapping[str, Any]) -> RunResult:
    try:
        return RunResult(**{**answer, "reason": ExitReason(answer["reason"])})
    except (KeyError, TypeError, ValueError) as error:
        raise SandboxError(f"the service of sandbox.url answered what is no result: {answer!s:.200}") from error


def _read_answer(url: str, status: int, text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
        message = str(answer.get("error", "")) if status != 200 else ""
    except (ValueError, AttributeError):
        answer, message = None, text[:200].decode("utf-8", "replace")
    if status == 200 and isinstance(answer, dict):
        return answer
    if status in (429, 502, 503, 504):
        raise Unavailable(message or str(status))
    if status == 404:
        raise SessionGone(message)
    if status == 422:
        raise ValueError(message)
    if status == 401:
        raise SandboxError(f"the service {url} refused the key in {API_KEY_VARIABLE}; set the one that it was started with")
    raise SandboxError(f"the service {url} answered {status}: {message}")
