"""The HTTP service of ``strop sandbox serve``.

    GET    /health               what runs, without a key
    POST   /v1/run               a program -> its result
    POST   /v1/sessions          language and limits -> {"id": ...}
    POST   /v1/sessions/ID/run   source and wall_s -> its result
    DELETE /v1/sessions/ID

An answer other than 200 is {"error": text}: 401 wrong key, 413 too large, 422 a program that this service does not run, 503 busy (try
again), 500 the sandbox failed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from aiohttp import web

from strop.extensions.code.sandbox.base import Limits, Program, RunResult, SandboxError, SandboxFull, SandboxSession
from strop.extensions.code.sandbox.sandbox_pool import SandboxPool
from strop.safety.http_server import bearer_key, check_sender, listening, make_app, read_json_object, stop_event
from strop.safety.site_guard import BadRequest

SESSION_IDLE_S = 900.0  # after which an unused session is closed
CEILINGS = Limits(
    cpu_s=120, wall_s=300, memory_mb=4096, processes=256, open_files=1024, file_mb=256, disk_mb=512, output_kb=32768
)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a service is reached, and what a client may ask for."""

    api_key: str = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 8900
    ceilings: Limits = CEILINGS
    max_request_mb: int = 16
    max_waiting: int = 256  # requests that wait for a worker; more are answered with 503


@dataclass
class OpenSession:
    """A client's interpreter."""

    session: SandboxSession
    stack: AsyncExitStack
    used: float
    running: int = 0


class SandboxServer:
    """Answers requests with one pool."""

    def __init__(self, pool: SandboxPool, options: ServerOptions) -> None:
        self.pool, self.options = pool, options
        self.pending = 0
        self.sessions: dict[str, OpenSession] = {}

    def make_app(self) -> web.Application:
        app = make_app(self._check, _answer_error, max_body=self.options.max_request_mb << 20)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.post("/v1/run", self.run),
                web.post("/v1/sessions", self.open_session),
                web.post("/v1/sessions/{id}/run", self.run_in_session),
                web.delete("/v1/sessions/{id}", self.delete_session),
            ]
        )
        app.on_cleanup.append(self._clean_up)
        return app

    def _check(self, request: web.Request) -> None:
        if request.path != "/health":
            check_sender(request, self.options.host, self.options.api_key, bearer_key(request), kinds=None)

    async def health(self, request: web.Request) -> web.Response:
        counts = {"pending": self.pending, "sessions": len(self.sessions)}
        languages = sorted(self.pool.commands)
        return web.json_response({"status": "ok", "level": self.pool.config.level, "languages": languages, **counts})

    async def run(self, request: web.Request) -> web.Response:
        body = await read_json_object(request)
        limits = self._read_limits(body.pop("limits", {}))
        program = Program(**{**body, "limits": limits})
        if not all(isinstance(text, str) for text in (program.source, program.language, program.stdin)):
            raise ValueError("source, language and stdin must be strings")
        if not all(isinstance(text, str) for pair in program.files.items() for text in pair):
            raise ValueError("files must be a mapping of strings")
        return await self._limited(lambda: self.pool.run(program))

    async def _limited(self, work: Callable[[], Awaitable[RunResult]]) -> web.Response:
        """Run something, unless too many wait already."""
        if self.pending >= self.options.max_waiting + self.pool.size:
            raise SandboxFull(f"{self.pending} requests are pending; try again")
        self.pending += 1
        try:
            return web.json_response(asdict(await work()))
        finally:
            self.pending -= 1

    def _read_limits(self, values: Mapping[str, Any]) -> Limits:
        limits, ceilings = Limits(**values), asdict(self.options.ceilings)
        for name, value in asdict(limits).items():
            whole = isinstance(ceilings[name], int) and not name.endswith("_s")
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise ValueError(f"the limit {name} is {value!r}, which is no number of its kind")
            if value > ceilings[name]:
                option = f"--max-{name.replace('_', '-')}"
                raise ValueError(f"the limit {name} is {value}, and this service allows {ceilings[name]}: start it with {option}")
        return limits

    async def open_session(self, request: web.Request) -> web.Response:
        body = await read_json_object(request)
        await self._close_idle()
        stack = AsyncExitStack()
        session = await stack.enter_async_context(
            self.pool.session(body.get("language", "python"), self._read_limits(body.get("limits", {})))
        )
        name = secrets.token_urlsafe(16)
        self.sessions[name] = OpenSession(session, stack, time.monotonic())
        return web.json_response({"id": name})

    async def run_in_session(self, request: web.Request) -> web.Response:
        found = self.sessions.get(request.match_info["id"])
        if found is None:
            raise BadRequest("there is no such session, or it was closed because it was not used", status=404)
        body = await read_json_object(request)
        source, wall_s = body["source"], float(body["wall_s"])
        if not isinstance(source, str) or not 0 < wall_s <= self.options.ceilings.wall_s:
            raise ValueError(f"source must be a string, and wall_s at most {self.options.ceilings.wall_s:g}; found {wall_s:g}")
        found.running += 1
        try:
            return await self._limited(lambda: found.session.run(source, wall_s=wall_s))
        finally:
            found.running -= 1
            found.used = time.monotonic()

    async def delete_session(self, request: web.Request) -> web.Response:
        found = self.sessions.pop(request.match_info["id"], None)
        if found is not None:
            await found.stack.aclose()
        return web.json_response({})

    async def _close_idle(self) -> None:
        long_ago = time.monotonic() - SESSION_IDLE_S
        for name in [name for name, found in self.sessions.items() if not found.running and found.used < long_ago]:
            await self.sessions.pop(name).stack.aclose()

    async def _clean_up(self, app: web.Application) -> None:
        while self.sessions:
            await self.sessions.popitem()[1].stack.aclose()
        await self.pool.close()


async def serve_sandbox(pool: SandboxPool, options: ServerOptions, started: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; programs that run then may end. Raises OSError where the port is taken."""
    stop, app = stop_event(), SandboxServer(pool, options).make_app()
    async with listening(app, (options.host, options.port), shutdown_s=options.ceilings.wall_s, cancels=False) as address:
        started(address)
        await stop.wait()


def _answer_error(error: Exception, request: web.Request) -> web.Response | None:
    match error:
        case BadRequest():
            status = error.status
        case ValueError() | TypeError() | KeyError() | AttributeError():
            status = 422
        case SandboxFull():
            status = 503
        case SandboxError():
            status = 500
        case _:
            return None
    return web.json_response({"error": str(error)}, status=status)
