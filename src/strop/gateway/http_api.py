"""What the servers of OpenAI's API share: keys, errors as JSON, bodies, streams of events."""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from strop.gateway.bad_request import BadRequest, format_error

log = logging.getLogger(__name__)

MAX_BODY = 32 * 2**20  # bytes
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into OpenAI's JSON."""
    try:
        return await handler(request)
    except BadRequest as error:
        return web.json_response(format_error(error), status=error.status)
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
    if not hmac.compare_digest(given.encode(), expected.encode()):
        raise BadRequest("the API key is missing or wrong: send Authorization: Bearer KEY", status=401, code="invalid_api_key")


async def read_json(request: web.Request) -> Any:
    """Read the body. Raises BadRequest."""
    if request.content_type != "application/json":  # what a web page may send to this machine without being asked
        raise BadRequest(f"the content type must be application/json; found {request.content_type}", status=415)
    try:
        return await request.json()
    except (ValueError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error


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
