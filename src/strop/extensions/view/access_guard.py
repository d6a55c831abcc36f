"""Who may use the view: anyone with its token, from this server's own page, by the address that it serves.

The page shows what a model wrote and what a run was configured with, and it listens where every program and every web page on the machine
can send requests. So each request must pass what every server of Strop asks (``strop.safety.site_guard``), and carry the token: in the
cookie that the printed address sets, or as ``Authorization: Bearer``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from aiohttp import web

from strop.safety.http_server import lower_headers
from strop.safety.site_guard import BadRequest, SiteGuard, is_key, refuse_content_type

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
    """Decides over requests. ``token`` None lets in anyone who reaches the address."""

    token: str | None = field(repr=False)

    @property
    def cookie_name(self) -> str:
        """Browsers share cookies between the ports of a host, so each server has its own name."""
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

    def check(self, request: web.Request) -> None:
        """Raise BadRequest for a request that is refused."""
        query = request.rel_url.raw_query_string
        if (refused := self.refuse(request.method, request.path, query, lower_headers(request))) is not None:
            raise BadRequest(refused[1], status=refused[0])
        if (size := request.content_length or 0) > LONGEST_BODY:
            raise web.HTTPRequestEntityTooLarge(LONGEST_BODY, size)

    def enter(self, request: web.Request) -> web.Response:
        """Set the cookie and go to the page. After a link of another site a browser would not send the cookie along a redirect, so a
        page of this site goes on."""
        if request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
            body = '<!doctype html><meta http-equiv="refresh" content="0;url=/"><title>Strop</title><a href="/">Open the view</a>'
            response = web.Response(text=body, content_type="text/html")
        else:
            response = web.Response(status=303, headers={"Location": "/"})
        if self.token is not None:
            response.headers["Set-Cookie"] = f"{self.cookie_name}={self.token}; Path=/; HttpOnly; SameSite=Strict"
        return response

    def enters(self, method: str, path: str, query: str) -> bool:
        """Return whether the request is the printed address, with the right token."""
        return method in READING and path == "/" and self.token is not None and self._is_token(_read_token(query))

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request carries the token."""
        if self.token is None:
            return True
        kind, _, key = headers.get("authorization", "").partition(" ")
        return (kind.lower() == "bearer" and self._is_token(key.strip())) or self._is_token(self._read_cookie(headers))

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


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add what keeps the page to itself, and leave out what tells about the server."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    for name in ("Server", "Date"):
        response.headers.popall(name, None)


def _read_token(query: str) -> str:
    return parse_qs(query).get("token", [""])[0]
