"""Tools of MCP servers: in this process, in one of their own, and one that dies."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from strop.endings import Ending, find_ending
from strop.extensions.tools.mcp_tools import McpServer
from strop.tools.base import ParsedReply, ToolConfigError
from strop.tools.toolbox import ToolLimits, open_toolbox
from strop.types import ToolCall

SERVER = """
import os
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("demo")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

@server.tool()
def refuse() -> str:
    raise ToolError("not today")

@server.tool()
def die() -> str:
    os._exit(1)

@server.tool()
def seen() -> str:
    return os.environ.get("SECRET", "nothing") + os.environ.get("GIVEN", "")

if __name__ == "__main__":
    server.run("stdio")
"""


HTTP = """
    import sys, uvicorn

    inner = server.streamable_http_app()

    async def app(scope, receive, send):
        if scope["type"] == "http" and (b"authorization", b"Bearer sesame") not in scope["headers"]:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"no"})
            return
        await inner(scope, receive, send)

    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]))
"""


def ask(server: McpServer, *turns: list[tuple[str, Mapping[str, Any]]]) -> list[str]:
    async def run() -> list[str]:
        told: list[str] = []
        async with open_toolbox([("mcp", server)], ToolLimits(timeout_s=20), "turn") as box:
            for calls in turns:
                reply = ParsedReply("", calls=tuple(ToolCall(name, given) for name, given in calls))
                told += [message.content for message in await box.answer(reply, {}) or ()]
        return told

    return asyncio.run(run())


def test_a_server_in_this_process_has_its_tools_and_its_errors_are_told() -> None:
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError as Refused

    server = MCPServer("demo")

    def add(a: int, b: int) -> int:
        return a + b

    def refuse() -> str:
        raise Refused("not today")

    for function in (add, refuse):
        server.tool()(function)
    told = ask(McpServer(server=server), [("add", {"a": 1, "b": 2}), ("add", {"a": "x"}), ("refuse", {})])
    assert told[0] == "3" and "b is missing" in told[1] and "not today" in told[2]


def test_a_server_in_a_process_sees_no_secrets_and_its_death_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    server = McpServer(command=(sys.executable, str(file)), env={"GIVEN": "!"})
    told = ask(server, [("add", {"a": 1, "b": 2}), ("seen", {})], [("die", {})], [("add", {"a": 1, "b": 2})])
    assert told[:2] == ["3", "nothing!"]
    assert all("server" in each and each.startswith("Error") for each in told[2:])


def test_a_server_at_an_address_is_asked_with_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_TOKEN", "sesame")
    file = tmp_path / "server.py"
    file.write_text(SERVER.replace('server.run("stdio")', HTTP))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(file), str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        while "running on" not in process.stdout.readline():
            assert process.poll() is None
        url = f"http://127.0.0.1:{port}/mcp"
        assert ask(McpServer(url=url, token_env="DEMO_TOKEN"), [("add", {"a": 1, "b": 2})]) == ["3"]
        with pytest.raises(ToolConfigError, match="cannot be reached") as caught:
            ask(McpServer(url=url), [("add", {"a": 1, "b": 2})])
        assert find_ending(caught.value) == Ending.TOOL_SERVER
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: McpServer(command=("/no/such/server",)),
            "mcp.command starts '/no/such/server', but there is no such program here",
        ),
        (lambda: McpServer(command=(sys.executable, "-c", "import time; time.sleep(1)"), start_timeout_s=0.2), "start_timeout_s"),
        (lambda: McpServer(command=(sys.executable, "-c", "pass")), "MCP server|ended"),
        (lambda: McpServer(), "mcp needs command"),
        (lambda: McpServer(url="http://localhost:1", token_env="NO_SUCH_TOKEN"), "no such variable"),
    ],
)
def test_a_server_that_cannot_be_had_is_an_error(make: Callable[[], McpServer], said: str) -> None:
    with pytest.raises(Exception, match=said):
        ask(make(), [("add", {})])
