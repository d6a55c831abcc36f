"""The tools of an MCP server: a process to start, or a URL (Model Context Protocol, with the package ``mcp``)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from strop.endings import Ending, RolloutFailed, failing_as
from strop.packages import find_program, install_command, is_installed
from strop.tools.base import Tool, ToolConfigError, ToolError
from strop.user_code import describe_error

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """An MCP server, connected separately for each episode."""

    command: tuple[str, ...] = ()  # started for each episode; it communicates on standard input and output
    url: str | None = None  # or the URL of a running server (streamable HTTP)
    server: Any = None  # or, from Python, an object of the mcp package that runs in this process
    env: Mapping[str, str] = field(
        default_factory=dict
    )  # for the command, which otherwise sees only PATH, HOME and similar variables
    cwd: str | None = None  # of the command
    token_env: str | None = None  # the variable of this process's environment that holds the bearer token for ``url``
    tools: tuple[str, ...] | None = None  # only these of its tools; None: all
    start_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if sum((bool(self.command), self.url is not None, self.server is not None)) != 1:
            raise ToolConfigError("mcp needs command, a list of words that starts the server, or url, and not both")
        if self.command and find_program(self.command[0], self.cwd, self.env.get("PATH")) is None:
            raise ToolConfigError(
                f"mcp.command starts {self.command[0]!r}, but there is no such program here; install it, or name it by its path"
            )
        if self.token_env is not None and self.token_env not in os.environ:
            raise ToolConfigError(
                f"mcp.token_env is {self.token_env}, but the environment has no such variable; set it to the token"
            )
        if not is_installed("mcp"):
            raise ToolConfigError(f"mcp needs the package mcp: {install_command('tools')}")

    @property
    def title(self) -> str:
        return self.url or " ".join(self.command) or type(self.server).__name__

    def open(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Sequence[Tool]]:
            connection = _Connection(self)
            try:
                with failing_as(Ending.TOOL_SERVER):
                    tools = await connection.connect()
                yield tools
            finally:
                await connection.close()

        return opened()

    @asynccontextmanager
    async def connect_client(self) -> AsyncIterator[Any]:
        from mcp import Client, StdioServerParameters

        if self.server is not None:
            target = self.server
        elif self.command:
            target = StdioServerParameters(command=self.command[0], args=[*self.command[1:]], env=dict(self.env), cwd=self.cwd)
        elif self.token_env is not None:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            headers = {"Authorization": f"Bearer {os.environ[self.token_env]}"}
            http = httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(30, read=300))
            async with http, Client(streamable_http_client(str(self.url), http_client=http)) as client:
                yield client
            return
        else:
            target = str(self.url)
        async with Client(target) as client:
            yield client


class _Connection:
    """A client in a separate task: a server that dies cancels that task, not the episode."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._hold())

    async def _hold(self) -> None:
        try:
            async with self._server.connect_client() as client:
                self._ready.set_result(client)
                await self._stop.wait()
        except Exception as error:
            if self._ready.done():
                raise
            self._ready.set_exception(
                ToolConfigError(f"the MCP server {self._server.title} cannot be reached: {_describe(error)}")
            )

    async def connect(self) -> Sequence[Tool]:
        """Return the server's tools. Raises ToolConfigError if it cannot be reached or has no such tools."""
        try:
            async with asyncio.timeout(self._server.start_timeout_s):
                client = await self._ready
                listed, cursor = [], None
                while True:
                    page = await self._race(client.list_tools(cursor=cursor))
                    listed += page.tools
                    if (cursor := page.next_cursor) is None:
                        break
        except TimeoutError:
            raise ToolConfigError(
                f"the MCP server {self._server.title} did not answer within {self._server.start_timeout_s:g} s (mcp.start_timeout_s)"
            ) from None
        wanted = self._server.tools
        names = {tool.name for tool in listed}
        if missing := sorted(set(wanted or ()) - names):
            raise ToolConfigError(
                f"the MCP server {self._server.title} has no tool {', '.join(missing)}; it has {', '.join(sorted(names))}"
            )
        return [self._make_tool(client, tool) for tool in listed if wanted is None or tool.name in wanted]

    def _make_tool(self, client: Any, tool: Any) -> Tool:
        async def call(**arguments: Any) -> str:
            result = await self._race(client.call_tool(tool.name, arguments))
            text = _read_content(result.content)
            if result.is_error:
                raise ToolError(text or f"{tool.name} failed and says nothing")
            return text

        schema = {key: value for key, value in tool.input_schema.items() if key not in ("title", "$schema")}
        return Tool(tool.name, tool.description or "", schema, call)

    async def _race(self, work: Awaitable[T]) -> T:
        """Await an answer of the server. Raises ToolError if it dies first, RolloutFailed if it serves other episodes too."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._owner}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                lost = "the tool's server has ended, and its tools with it"
                raise ToolError(lost) if self._server.command else RolloutFailed(lost, Ending.TOOL_SERVER)
            return task.result()
        except (ToolError, RolloutFailed):
            raise
        except Exception as error:
            raise ToolError(f"the tool's server answered with an error: {_describe(error)}") from error
        finally:
            if not task.done():
                task.cancel()

    async def close(self) -> None:
        self._stop.set()
        if not self._ready.done():
            self._owner.cancel()
        with suppress(Exception, asyncio.CancelledError):
            await asyncio.wait_for(self._owner, 10)


def _describe(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return describe_error(error)


def _read_content(content: Sequence[Any]) -> str:
    """Return the text of a result; for other content, its kind."""
    return "\n".join(str(block.text) if block.type == "text" else f"[{block.type}]" for block in content)
