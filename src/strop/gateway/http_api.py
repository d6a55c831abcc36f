"""What the servers of OpenAI's API share: keys, errors as JSON, bodies, streams of events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiohttp import web

from strop.gateway.bad_request import BadRequest, format_error
from strop.generation.base import InvalidRequest
from strop.safety.http_requests import BODY_SECONDS, read_json_body
from strop.safety.site_guard import is_key

log = logging.getLogger(__name__)

MAX_BODY = 32 * 2**20  # bytes
LARGE_BODY = 2**16  # bytes that are tokenized in about a tenth of a second
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into OpenAI's JSON."""
    try:
        return await handler(request)
    except BadRequest as error:
        return web.json_response(format_error(error), status=error.status)
    except InvalidRequest as error:
        return web.json_response(format_error(error), status=400)
    except web.HTTPException as error:
        reason = BadRequest(f"{request.method} {request.path}: {error.reason}", status=error.status)
        return web.json_response(format_error(reason), status=error.status)
    except ConnectionError:  # the client went away
        raise
    except Exception as error:
        log.exception("a request failed")
        return web.json_response(format_error(error), status=500)


def bearer_key(request: web.Request) -> str:
    """Return the key of a request, "" without one."""
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def check_key(given: str, expected: str) -> None:
    if not is_key(given, expected):
        raise BadRequest("the API key is missing or wrong: send Authorization: Bearer KEY", status=401, code="invalid_api_key")


async def read_json(request: web.Request, seconds: float = BODY_SECONDS, setting: str = "") -> Any:
    """Read the body, which must arrive within ``seconds``. Raises BadRequest."""
    try:
        return await read_json_body(request, seconds)
    except TimeoutError:
        raise BadRequest(f"the request did not arrive within {seconds:g} s{setting and f' ({setting})'}", status=408) from None
    except ValueError as error:
        raise BadRequest(str(error)) from error


async def read_beside(request: web.Request, read: Callable[[], T]) -> T:
    """Call ``read``, in a thread if the request is so large that it would hold up all others."""
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


async def send_event(response: web.StreamResponse, data: Any, event: str = "") -> None:
    """Send an event: a text, or what JSON writes."""
    text = data if isinstance(data, str) else json.dumps(data)
    await response.write(f"{f'event: {event}' + chr(10) if event else ''}data: {text}\n\n".encode())
