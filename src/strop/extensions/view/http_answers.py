"""Requests read and answered: parameters with a sentence for each mistake, JSON, and errors as sentences."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web

from strop.extensions.view.view_error import ViewError
from strop.monitoring.rollout_index.rollout_filter import ORDERS, RolloutFilter
from strop.safety.http_server import Handler
from strop.safety.site_guard import BadRequest

log = logging.getLogger(__name__)

LARGEST = 2**53


def answer_json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(value, allow_nan=False).encode(), status=status, content_type="application/json")


def in_thread(answer: Callable[[web.Request], Any]) -> Handler:
    """Return an endpoint that answers what a function returns, which reads files and runs in a thread."""

    def respond(request: web.Request) -> web.Response:
        value = answer(request)
        return value if isinstance(value, web.Response) else answer_json(value)

    async def endpoint(request: web.Request) -> web.Response:
        return await asyncio.to_thread(respond, request)

    return endpoint


def answer_error(error: Exception, request: web.Request) -> web.Response:
    """Answer with a sentence for the reader of the page."""
    if isinstance(error, BadRequest) and request.path == "/":
        text = f"<!doctype html><title>Strop</title><p>Not shown: {str(error).replace('`', '')}</p>"
        return web.Response(text=text, status=error.status, content_type="text/html")
    if isinstance(error, BadRequest | ViewError):
        return answer_json({"error": str(error)}, error.status)
    if isinstance(error, OSError):  # a folder that is being removed, a disk that went away
        return answer_json({"error": f"a file of the run cannot be read: {error.strerror or error}"}, 422)
    log.error("%s cannot be answered", request.path, exc_info=error)
    return answer_json({"error": f"this cannot be shown ({type(error).__name__}: {str(error)[:200]})"}, 422)


def read_int(request: web.Request, name: str, default: int | None = None) -> int | None:
    text = request.query.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < LARGEST:
        raise ViewError(f"{name}: found {text[:40]!r}; give a whole number from 0 on", 400)
    return value


def read_count(request: web.Request, name: str, default: int) -> int:
    value = read_int(request, name, default)
    return default if value is None else value


def read_float(request: web.Request, name: str) -> float | None:
    text = request.query.get(name, "")
    try:
        return float(text) if text else None
    except ValueError:
        raise ViewError(f"{name}: found {text[:40]!r}; give a number", 400) from None


def read_place(request: web.Request) -> tuple[int, int, int]:
    """Return step, group and sample of a path."""
    step, group, *sample = (int(request.match_info[name]) for name in ("step", "group", "sample") if name in request.match_info)
    return step, group, sample[0] if sample else 0


def read_filter(request: web.Request) -> RolloutFilter:
    """Return the conditions of a request for rollouts. Raises ViewError."""
    words = request.query

    def word(name: str) -> str | None:
        return words.get(name) or None

    kept = {"": None, "1": True, "true": True, "0": False, "false": False}.get(words.get("kept", "").lower(), "unknown")
    if kept == "unknown":
        raise ViewError(f"kept: found {words['kept'][:40]!r}; give 1 or 0", 400)
    return RolloutFilter(
        steps=_read_steps(request),
        task=word("task"),
        environment=word("env"),
        ending=word("ending"),
        kept=None if kept is None else bool(kept),
        reward=(read_float(request, "reward_min"), read_float(request, "reward_max")),
        tokens=(read_float(request, "tokens_min"), read_float(request, "tokens_max")),
    )


def _read_steps(request: web.Request) -> tuple[int, int] | None:
    step = read_int(request, "step")
    if step is not None:
        return step, step
    text = request.query.get("steps", "")
    if not text:
        return None
    first, dash, last = text.partition("-")
    if not (first.isdecimal() or not first) or not (last.isdecimal() or not last) or len(text) > 30 or not (first or last):
        raise ViewError(f"steps: found {text[:40]!r}; give a range such as 10-20, 10- or -20", 400)
    low = int(first or 0)
    return low, int(last) if last else (LARGEST if dash else low)


def read_order(request: web.Request) -> str:
    order = request.query.get("sort") or "-step"
    if order not in ORDERS:
        raise ViewError(f"sort: found {order[:40]!r}; give one of {', '.join(ORDERS)}", 400)
    return order
