"""What the servers of OpenAI's API share: paths, errors, streams of events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiohttp import web

from strop.generation.base import InvalidRequest
from strop.safety.http_server import Handler
from strop.safety.site_guard import BadRequest

log = logging.getLogger(__name__)

MAX_BODY = 32 * 2**20  # bytes
LARGE_BODY = 2**16  # bytes that take about a tenth of a second to tokenize
T = TypeVar("T")


def answer_error(error: Exception, request: web.Request) -> web.Response:
    """Answer with an error in the format of OpenAI's API."""
    status = error.status if isinstance(error, BadRequest) else 400 if isinstance(error, InvalidRequest) else 500
    return web.json_response(format_error(error), status=status)


def format_error(error: Exception) -> dict[str, Any]:
    """Return an error in the format of OpenAI's API. Internal errors are logged, but not sent to the client."""
    if isinstance(error, BadRequest | InvalidRequest):
        status, param, code = (getattr(error, name, None) for name in ("status", "param", "code"))
        kinds = {401: "authentication_error", 429: "rate_limit_error", 503: "server_error"}
        kind = kinds.get(status or 400, "invalid_request_error")
        return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
    log.error("a request failed", exc_info=error)
    return {"error": {"message": "the server failed; its log says why", "type": "server_error", "param": None, "code": None}}


def add_routes(app: web.Application, models: Handler, complete: Handler) -> None:
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.+}", models)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_post("/v1/completions", complete)


async def read_beside(request: web.Request, read: Callable[[], T]) -> T:
    """Call ``read``, in a thread if the request is so large that it would delay all others."""
    if (request.content_length or LARGE_BODY) < LARGE_BODY:
        return read()
    return await asyncio.to_thread(read)


def list_models(request: web.Request, name: str, max_length: int) -> web.Response:
    model = {"id": name, "object": "model", "created": 0, "owned_by": "strop", "max_model_len": max_length}
    asked = request.match_info.get("name")
    if asked not in (None, name):
        raise BadRequest(f"the model {asked!r} does not exist", "model", status=404, code="model_not_found")
    return web.json_response({"object": "list", "data": [model]} if asked is None else model)


async def open_stream(request: web.Request) -> web.StreamResponse:
    """Begin an answer of server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    return response


@asynccontextmanager
async def stream_completions(request: web.Request) -> AsyncIterator[web.StreamResponse]:
    """Answer with the events of completions. The status is sent before anything can fail, so errors are events too."""
    response = await open_stream(request)
    try:
        yield response
    except ConnectionError:  # the client went away
        raise
    except Exception as error:
        await send_event(response, format_error(error))
    await send_event(response, "[DONE]")
    await response.write_eof()


async def send_event(response: web.StreamResponse, data: Any, event: str = "") -> None:
    """Send an event: a text, or a value as JSON."""
    text = data if isinstance(data, str) else json.dumps(data)
    await response.write(f"{f'event: {event}' + chr(10) if event else ''}data: {text}\n\n".encode())
