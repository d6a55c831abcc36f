"""Connections to SGLang's server, which closes those that nobody uses."""

from __future__ import annotations

import asyncio

import pytest

from strop.extensions.sglang import server_client
from strop.extensions.sglang.server_client import ServerClient

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def test_a_connection_that_was_not_used_for_a_while_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may close it at any moment, and a POST that it meets would fail."""
    monkeypatch.setattr(server_client, "KEEP_ALIVE", 0.2)
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
            await reader.readexactly(2)  # the body: {}
            writer.write(ANSWER)

    async def ask() -> tuple[int, int]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = ServerClient(server.sockets[0].getsockname()[1], "key")
        for _ in range(2):
            await client.post("/at_once")
        at_once = connections
        await asyncio.sleep(0.5)
        await client.post("/later")
        await client.close()
        server.close()
        return at_once, connections

    assert asyncio.run(ask()) == (1, 2)
    monkeypatch.undo()
    assert server_client.KEEP_ALIVE < 5  # seconds: SGLANG_TIMEOUT_KEEP_ALIVE
