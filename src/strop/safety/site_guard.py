"""Detects requests to an HTTP server that no authorised user sent.

Every web page that a user visits can send requests to servers on the machine, and a server without a key answers all of them. So
a request must - name the server's own address in its Host header: the name of an attacker that resolves to this machine (DNS
rebinding) does not; - not come from another site, as a browser says by ``Sec-Fetch-Site`` and ``Origin``; another port of this
machine is another site; - have a content type that a page can send to another site only after asking, if it has a body.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass

JSON = ("application/json",)
Refusal = tuple[int, str]  # an HTTP status, and the reason


class BadRequest(ValueError):
    """A request that cannot be answered, with the reason."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclass(frozen=True)
class SiteGuard:
    """Accepts or refuses requests to one address. Header names are in lower case."""

    host: str  # that it listens on
    port: int

    def refuse_host(self, headers: Mapping[str, str]) -> Refusal | None:
        """Refuse a request sent to another name than this server's."""
        host = headers.get("host", "")
        if self.serves(host):
            return None
        return 421, f"this address is not served: the Host header names {host[:100]!r}, and the server is {self.host}:{self.port}"

    def serves(self, host: str) -> bool:
        """Return whether a Host header names this server. Numeric addresses cannot be rebound, so any is accepted if the server
        listens on all.
        """
        name, port = _split_host(host)
        if port != self.port:
            return False
        if name in {"127.0.0.1", "localhost", "::1"} or name == self.host.lower():
            return True
        if not _is_unspecified(self.host):
            return False
        return _is_address(name) or name in (socket.gethostname().lower(), socket.getfqdn().lower())

    def refuse_origin(self, headers: Mapping[str, str], *, opens_page: bool = False) -> Refusal | None:
        """Refuse a request of another site's page. ``opens_page``: links from other sites are allowed."""
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site not in (None, "same-origin", "none") and not opens_page:
            return 403, "the request comes from another site; only the server's own page and programs may send it"
        host = headers.get("host", "").lower()
        if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
            return 403, "the request comes from another origin; only the server's own page and programs may send it"
        return None


def refuse_content_type(headers: Mapping[str, str], kinds: Collection[str] = JSON) -> Refusal | None:
    """Refuse a body of another content type: any page may send forms and plain text without a preflight request."""
    found = headers.get("content-type", "").partition(";")[0].strip().lower()
    return None if found in kinds else (415, f"the content type must be {' or '.join(kinds)}; found {found[:100] or 'none'}")


def is_key(given: str, expected: str) -> bool:
    """Compare a request's key in constant time, for any bytes in its header."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())


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


def is_loopback(host: str) -> bool:
    """Whether a host is reachable only from this machine."""
    return ipaddress.ip_address(host).is_loopback if _is_address(host) else host == "localhost"


def _is_unspecified(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host).is_unspecified
