"""Who may ask the view: whoever has its token, from this server's own page, by the address that it serves.

The page shows what a model wrote and what a run was configured with, and it listens where every program and every web page on the machine
can send requests. So each request must
- name the address that is served in its Host header: a name of an attacker that resolves to this machine (DNS rebinding) does not;
- not come from another site, as a browser says by ``Sec-Fetch-Site`` and ``Origin``; another port of this machine is another site;
- carry the token: in the cookie that the printed address sets, or as ``Authorization: Bearer``.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

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
class AccessGuard:
    """Decides over requests. ``token`` None lets in whoever reaches the address."""

    token: str | None = field(repr=False)
    host: str
    port: int

    @property
    def cookie_name(self) -> str:
        """Browsers share cookies between the ports of a host, so each server has a name of its own."""
        return f"strop_view_{self.port}"

    def refuse(self, method: str, path: str, query: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Return the status and the reason why a request is refused; None: it is answered. Header names are in lower case."""
        if method not in (*READING, *CHANGING):
            return 405, f"{method} is not answered; the view knows GET and PUT"
        if not self._serves(headers.get("host", "")):
            return 421, "this address is not served: open the one that `strop view` printed (its Host header differs)"
        if (reason := self._refuse_other_sites(method, path, headers)) is not None:
            return 403, reason
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
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def _read_cookie(self, headers: Mapping[str, str]) -> str:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self.cookie_name)
        except CookieError:
            return ""
        return "" if found is None else found.value

    def _serves(self, host: str) -> bool:
        """Return whether a Host header names this server. An address in numbers cannot be rebound, so any is right where all are served."""
        name, port = _split_host(host)
        if port != self.port:
            return False
        if name in {"127.0.0.1", "localhost", "::1"} or name == self.host.lower():
            return True
        if not _is_unspecified(self.host):
            return False
        return _is_address(name) or name in (socket.gethostname().lower(), socket.getfqdn().lower())

    def _refuse_other_sites(self, method: str, path: str, headers: Mapping[str, str]) -> str | None:
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        opens_page = method in READING and path == "/" and headers.get("sec-fetch-mode", "navigate") == "navigate"
        if site not in (None, "same-origin", "none") and not opens_page:
            return "the request comes from another site; only the view's own page may send it"
        if origin is not None and origin.lower() != f"http://{headers.get('host', '').lower()}":
            return "the request comes from another origin; only the view's own page may send it"
        if method in CHANGING:
            if site is None and origin is None and "authorization" not in headers:
                return "a change must come from the view's own page, or with Authorization: Bearer TOKEN"
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                return "a change must be sent as application/json"
        return None


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


def _split_host(host: str) -> tuple[str, int]:
    """Split a Host header; the port of one without is 80."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        name, port = host, "80"
    return name.lower().removeprefix("[").removesuffix("]"), int(port) if port.isdecimal() and len(port) < 6 else -1


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_unspecified(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host).is_unspecified
