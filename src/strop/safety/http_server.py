"""Common parts of Strop's HTTP servers: checking the sender, JSON bodies and error answers, and listening until Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from aiohttp import web

from strop.safety.site_guard import JSON, BadRequest, SiteGuard, is_key, refuse_content_type

BODY_SECONDS = 120.0  # time limit for a body to arrive
SHUTDOWN_SECONDS = 2.0  # for answers in progress when a server stops
LONGEST_LINE = 2**16  # bytes of a URL or a header
SEND_KEY = "the API key is missing or wrong: send Authorization: Bearer KEY"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
AnswerError = Callable[[Exception, web.Request], web.Response | None]


def make_app(check: Callable[[web.Request], object], answer_error: AnswerError, *, max_body: int) -> web.Application:
    """Return an app without handlers. ``check`` raises BadRequest for a request that is refused. ``answer_error`` returns what answers an
    error, those of aiohttp given as BadRequest; None for a fault of the server."""

    @web.middleware
    async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        allowed = None
        try:
            check(request)
            return await handler(request)
        except ConnectionError:  # the client went away
            raise
        except web.HTTPException as error:
            reason = f"{request.method} {request.path[:200]}: {error.reason}"
            if error.status == 413:
                reason = f"the request is larger than {f'{max_body >> 20} MiB' if max_body >= 2**20 else f'{max_body >> 10} kB'}"
            found: Exception = BadRequest(reason, status=error.status)
            allowed = error.headers.get("Allow")
        except Exception as error:
            found = error
        if (answer := answer_error(found, request)) is None:
            raise found
        if allowed is not None:
            answer.headers["Allow"] = allowed
        return answer

    return web.Application(middlewares=[answer_errors], client_max_size=max_body)


def lower_headers(request: web.Request) -> dict[str, str]:
    return {name.lower(): value for name, value in request.headers.items()}


def check_sender(
    request: web.Request, host: str, key: str | None, given: str, *, kinds: Collection[str] | None = JSON, help: str = SEND_KEY
) -> None:
    """Raise BadRequest for a request without the key, if there is one, and for one that may come from another site's page.

    ``host``: the server's listening address. Web pages do not have the key, so a server with a key may also be reached under a
    proxy's name. ``kinds``: content types of bodies; None: any.
    """
    if key is not None and not is_key(given, key):
        raise BadRequest(help, status=401, code="invalid_api_key")
    headers, transport = lower_headers(request), request.transport
    local = transport.get_extra_info("sockname") if transport is not None else None
    guard = SiteGuard(host, local[1] if isinstance(local, tuple) else 0)
    refused = guard.refuse_host(headers) if key is None else None
    refused = refused or guard.refuse_origin(headers)
    if refused is None and kinds is not None and request.can_read_body:
        refused = refuse_content_type(headers, kinds)
    if refused is not None:
        raise BadRequest(refused[1], status=refused[0])


def bearer_key(request: web.Request) -> str:
    """Return the key of a request, "" without one."""
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


async def read_body(request: web.Request, seconds: float = BODY_SECONDS, setting: str = "") -> bytes:
    """Read a body, which must arrive within ``seconds``. Raises BadRequest."""
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError:
        raise BadRequest(f"the request did not arrive within {seconds:g} s{setting and f' ({setting})'}", status=408) from None


def parse_json(body: bytes, status: int = 400) -> Any:
    """Parse a JSON body, ignoring the charset in its header. Raises BadRequest with this status."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadRequest(f"the body is not valid JSON: {reason}", status=status) from error


async def read_json_object(request: web.Request) -> dict[str, Any]:
    body = parse_json(await read_body(request), 422)
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object", status=422)
    return body


@asynccontextmanager
async def listening(
    app: web.Application,
    place: tuple[str, int] | socket.socket,
    *,
    settings: str = "--host or --port",
    shutdown_s: float = SHUTDOWN_SECONDS,
    cancels: bool = True,
) -> AsyncIterator[str]:
    """Serve an app during the context. Yields its URL. ``cancels``: an answer is cancelled when its client disconnects.

    Raises OSError, which names ``settings``, if the address is not available.
    """
    runner = web.AppRunner(
        app, handler_cancellation=cancels, shutdown_timeout=shutdown_s, access_log=None,
        max_line_size=LONGEST_LINE, max_field_size=LONGEST_LINE,
    )  # fmt: skip
    await runner.setup()
    try:
        if isinstance(place, tuple):
            with naming_address(*place, settings):
                await web.TCPSite(runner, *place).start()
        else:
            await web.SockSite(runner, place).start()
        yield make_address(place[0] if isinstance(place, tuple) else runner.addresses[0][0], runner.addresses[0][1])
    finally:
        await runner.cleanup()


@contextmanager
def naming_address(host: str, port: int, settings: str = "--host or --port") -> Iterator[None]:
    """Add to an OSError which address is not available, and which settings change it."""
    try:
        yield
    except OSError as error:
        known = {number: os.strerror(number) for number in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)}
        reason = known.get(error.errno or 0, error.strerror or error)
        raise OSError(f"{host}:{port} cannot be listened on: {reason}; set another {settings}") from error


def make_address(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def make_local(address: str) -> str:
    """Return the URL under which this machine reaches a server, which may listen on all addresses."""
    return address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def stop_event(signals: Sequence[int] = (signal.SIGINT, signal.SIGTERM)) -> asyncio.Event:
    """Return an event that Ctrl-C and SIGTERM set."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in signals:
        with suppress(RuntimeError):  # not in the main thread
            loop.add_signal_handler(number, event.set)
    return event
