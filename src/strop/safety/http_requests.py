"""What every HTTP server on aiohttp does with a request before it reads it: who sent it, and JSON or an error in its place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from typing import Any

from aiohttp import web

from strop.safety.site_guard import JSON, Refusal, SiteGuard, refuse_content_type

BODY_SECONDS = 120.0  # in which a body has to arrive


def refuse_request(request: web.Request, host: str, *, has_key: bool, kinds: Collection[str] | None = JSON) -> Refusal | None:
    """Return the status and the reason why a request is refused; None: it is answered.

    ``host``: the address that the server was told to listen on. ``has_key``: every request needs a key, which no web page has, so the
    server may be reached by other names, those of a proxy. ``kinds``: content types of bodies; None: any.
    """
    headers = {name.lower(): value for name, value in request.headers.items()}
    transport = request.transport
    local = transport.get_extra_info("sockname") if transport is not None else None
    guard = SiteGuard(host, local[1] if isinstance(local, tuple) else 0)
    refused = None if has_key else guard.refuse_host(headers)
    refused = refused or guard.refuse_origin(headers)
    if refused is None and kinds is not None and request.can_read_body:
        refused = refuse_content_type(headers, kinds)
    return refused


async def read_json_body(request: web.Request, seconds: float = BODY_SECONDS) -> Any:
    """Read a body of JSON, whatever charset its header claims. Raises ValueError for one that is none, and TimeoutError."""
    async with asyncio.timeout(seconds):
        body = await request.read()
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is one, too
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"the body is not valid JSON: {reason}") from error
