"""The only way out of a local sandbox: an HTTP proxy in this process that lets through what the network policy names.

It listens on a socket that the sandbox made in its own network namespace. Host names are resolved here, once, and the address that was
checked is the one that is connected to. Addresses of this machine and of private networks are refused unless the policy names them with
their port.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from strop.extensions.sandboxes.base import NetworkPolicy

PROXY_PORT = 3128  # in the sandbox
CONNECT_S, HEADER_S, IDLE_S = 20.0, 30.0, 600.0
MAX_HEADER = 1 << 16
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class _Refused(Exception):
    """A request that is answered with an error. ``status``: HTTP's."""

    def __init__(self, status: str, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class EgressProxy:
    """Serves the connections of one sandbox."""

    network: NetworkPolicy

    def names(self, host: str, port: int) -> bool:
        """Whether the policy names a host: HOST, *.DOMAIN, or HOST:PORT."""
        host = host.lower().rstrip(".")
        for entry in self.network.hosts:
            name, _, only = entry.lower().partition(":") if entry.count(":") == 1 else (entry.lower(), "", "")
            if only and only != str(port):
                continue
            if host == name or (name.startswith("*.") and host.endswith(name[1:])):
                return True
        return False

    async def find_address(self, host: str, port: int) -> str:
        """Return the address that a host may be reached at. Raises _Refused."""
        named = self.names(host, port)
        if self.network.egress != "all" and not named:
            raise _Refused("403 Forbidden", f"the network policy of this sandbox does not name {host}:{port}")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise _Refused("502 Bad Gateway", f"{host} cannot be resolved: {error}") from error
        address = str(found[0][4][0])
        exact = f"{host.lower()}:{port}" in (entry.lower() for entry in self.network.hosts)
        if not ipaddress.ip_address(address.partition("%")[0]).is_global and not exact:
            raise _Refused(
                "403 Forbidden", f"{host} is {address}, of this machine or a private network: name it as {host}:{port}"
            )
        return address

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection: CONNECT, or one plain request with an absolute address."""
        try:
            try:
                await self._serve(reader, writer)
            except _Refused as error:
                body = f"{error}\n".encode()
                head = f"HTTP/1.1 {error.status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                writer.write(head.encode() + body)
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            await _close(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HEADER_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, _, rest = head.partition("\r\n")
        words = line.split(" ")
        if len(words) != 3 or len(head) > MAX_HEADER:
            raise _Refused("400 Bad Request", "this is no request to a proxy")
        method, target, version = words
        tunnel = method == "CONNECT"
        try:
            address = urlsplit(f"//{target}" if tunnel else target)
            host, port = address.hostname or "", address.port or (443 if tunnel else 80)
        except ValueError:
            host, port, address = "", 0, urlsplit("")
        if not host or (not tunnel and address.scheme != "http"):
            raise _Refused("400 Bad Request", f"{target[:200]} is no address that this proxy knows")
        there_reader, there = await _connect(await self.find_address(host, port), port)
        if tunnel:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:  # one request a connection, so that each is checked
            kept = [each for each in rest.split("\r\n") if each and not each.lower().startswith(("proxy-", "connection:"))]
            path = (address.path or "/") + (f"?{address.query}" if address.query else "")
            there.write("\r\n".join([f"{method} {path} {version}", *kept, "Connection: close", "", ""]).encode("latin-1"))
        await join(reader, writer, there_reader, there)


def forward(port: int) -> Handler:
    """Return a handler that connects a sandbox to a port of this machine's loopback."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await join(reader, writer, *await _connect("127.0.0.1", port))
        except (_Refused, OSError, TimeoutError):
            pass
        finally:
            await _close(writer)

    return serve


async def _connect(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        async with asyncio.timeout(CONNECT_S):
            return await asyncio.open_connection(address, port)
    except (OSError, TimeoutError) as error:
        raise _Refused("502 Bad Gateway", f"{address}:{port} does not answer: {error}") from error


async def join(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, there_reader: asyncio.StreamReader, there: asyncio.StreamWriter
) -> None:
    """Copy both ways until one side ends or nothing arrives for ``IDLE_S``."""
    ways = [asyncio.ensure_future(_copy(*pair)) for pair in ((reader, there), (there_reader, writer))]
    try:
        await asyncio.wait(ways)
    finally:
        for way in ways:
            way.cancel()
        await _close(there)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError, TimeoutError):
        while True:
            async with asyncio.timeout(IDLE_S):
                part = await source.read(1 << 16)
            if not part:
                break
            sink.write(part)
            await sink.drain()
    with suppress(OSError, RuntimeError):
        sink.write_eof()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
