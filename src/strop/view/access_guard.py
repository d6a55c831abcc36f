"""Who may ask the view: whoever has its token, from this server's own page, by the address that it serves.

The page shows what a model wrote and what a run was configured with, and it listens where every program and every web page on the machine
can send requests. So each request must pass what every server of Strop asks (``strop.safety.site_guard``), and carry the token: in the
cookie that the printed address sets, or as ``Authorization: Bearer``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from strop.safety.site_guard import SiteGuard, is_key, refuse_content_type

READING = ("GET", "HEAD")
CHANGING = ("PUT",)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
NO_TOKEN = "the token is missing or wrong: open the address that `strop view` printed, or send Authorization: Bearer TOKEN"
LONGEST_BODY = 64 * 1024  # bytes; a star with its note is far shorter


@dataclass(frozen=True)
class AccessGuard(SiteGuard):
    """Decides over requests. ``token`` None lets in whoever reaches the address."""

    token: str | None = field(repr=False)

    @property
    def cookie_name(self) -> str:
        """Browsers share cookies between the ports of a host, so each server has a name of its own."""
        return f"strop_view_{self.port}"

    def refuse(self, method: str, path: str, query: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Return the status and the reason why a request is refused; None: it is answered. Header names are in lower case."""
        if method not in (*READING, *CHANGING):
            return 405, f"{method} is not answered; the view knows GET and PUT"
        opens_page = method in READING and path == "/" and headers.get("sec-fetch-mode", "navigate") == "navigate"
        refused = self.refuse_host(headers) or self.refuse_origin(headers, opens_page=opens_page)
        if refused is None and method in CHANGING:
            refused = self._refuse_change(headers)
        if refused is not None:
            return refused
        if not self.knows(headers) and not self.enters(method, path, query):
            return 401, NO_TOKEN
        return None

    def enters(self, method: str, path: str, query: str) -> bool:
        """Return whether the request is the printed address, with the right token."""
        return method in READING and path == "/" and self.token is not None and self._is_token(_read_token(query))

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request carries the token."""
        if self.token is None:
            return True
        kind, _, key = headers.get("authorization", "").partition(" ")
        return (kind.lower() == "bearer" and self._is_token(key.strip())) or self._is_token(self._read_cookie(headers))

    def make_cookie(self) -> str:
        return f"{self.cookie_name}={self.token}; Path=/; HttpOnly; SameSite=Strict"

    def _is_token(self, given: str) -> bool:
        return self.token is not None and is_key(given, self.token)

    def _read_cookie(self, headers: Mapping[str, str]) -> str:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self.cookie_name)
        except CookieError:
            return ""
        return "" if found is None else found.value

    def _refuse_change(self, headers: Mapping[str, str]) -> tuple[int, str] | None:
        if not {"sec-fetch-site", "origin", "authorization"} & headers.keys():
            return 403, "a change must come from the view's own page, or with Authorization: Bearer TOKEN"
        return None if refuse_content_type(headers) is None else (403, "a change must be sent as application/json")


class GuardedApp:
    """An ASGI app behind a guard, with headers that keep the page to itself."""

    def __init__(self, app: Any, guard: AccessGuard) -> None:
        self.app, self.guard = app, guard

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        method, path, query = scope["method"], scope["path"], scope.get("query_string", b"").decode("latin-1")
        refused = self.guard.refuse(method, path, query, headers)
        if refused is None and int(_digits(headers.get("content-length", "0"))) > LONGEST_BODY:
            refused = 413, f"the request is larger than {LONGEST_BODY // 1024} kB"
        if refused is not None:
            await _answer_refusal(send, *refused, as_page=path == "/", method=method)
        elif self.guard.enters(method, path, query) or (path == "/" and "token=" in query):
            await _enter(send, self.guard, headers)
        else:
            await self.app(scope, receive, _with_headers(send))


def _with_headers(send: Any) -> Any:
    async def send_with_headers(message: Any) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message["headers"]}
            extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message["headers"], *(pair for pair in extra if pair[0] not in present)]}
        await send(message)

    return send_with_headers


async def _enter(send: Any, guard: AccessGuard, headers: Mapping[str, str]) -> None:
    """Set the cookie and go to the page. After a link of another site a browser would not send the cookie along a redirect, so a page
    of this site goes on."""
    cookie = [(b"set-cookie", guard.make_cookie().encode())] if guard.token is not None else []
    if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        body = b'<!doctype html><meta http-equiv="refresh" content="0;url=/"><title>Strop</title><a href="/">Open the view</a>'
        await _respond(send, 200, body, [(b"content-type", b"text/html; charset=utf-8"), *cookie])
    else:
        await _respond(send, 303, b"", [(b"location", b"/"), *cookie])


async def _answer_refusal(send: Any, status: int, reason: str, *, as_page: bool, method: str) -> None:
    if as_page:
        body, kind = (
            f"<!doctype html><title>Strop</title><p>Not shown: {reason.replace('`', '')}</p>".encode(),
            b"text/html; charset=utf-8",
        )
    else:
        body, kind = json.dumps({"error": reason}).encode(), b"application/json"
    await _respond(send, status, b"" if method == "HEAD" else body, [(b"content-type", kind)])


async def _respond(send: Any, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    length = [(b"content-length", str(len(body)).encode())]
    await _with_headers(send)({"type": "http.response.start", "status": status, "headers": [*headers, *length]})
    await send({"type": "http.response.body", "body": body})


def _read_token(query: str) -> str:
    return parse_qs(query).get("token", [""])[0]


def _digits(text: str) -> str:
    return text if text.isdecimal() and len(text) < 16 else str(LONGEST_BODY + 1)
