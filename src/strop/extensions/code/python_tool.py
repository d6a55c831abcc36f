"""A Python interpreter as a tool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar

from strop.extensions.code.python_cell import run_cell
from strop.extensions.code.sandbox.base import Limits, SandboxSession
from strop.extensions.code.sandbox.sandbox_pool import get_sandbox
from strop.tools.base import Tool


@dataclass(frozen=True, kw_only=True)
class PythonTool:
    """``python(code)``: runs code in the sandbox. Variables and files stay until the episode ends.

    Prints what the code prints and the value of its last expression, as a notebook does.
    """

    needed_resources: ClassVar[tuple[str, ...]] = ("sandbox",)
    timeout_s: float = 10.0  # of a call, after which the interpreter starts again, empty
    memory_mb: int = 256
    max_output_chars: int = 4000  # of an answer; more is cut out of the middle

    def open(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Sequence[Tool]]:
            async with AsyncExitStack() as stack:
                yield (self._make_tool(stack),)

        return opened()

    def _make_tool(self, stack: AsyncExitStack) -> Tool:
        lock = asyncio.Lock()  # calls of one turn run one after another
        opened: list[SandboxSession] = []  # with the first call: most episodes may never need it
        limits = Limits(cpu_s=self.timeout_s, wall_s=self.timeout_s, memory_mb=self.memory_mb)

        async def python(code: str) -> str:
            async with lock:
                if not opened:
                    opened.append(await stack.enter_async_context(get_sandbox().session("python", limits)))
                result = await run_cell(opened[0], code, wall_s=self.timeout_s)
            return result.shorten(self.max_output_chars) or "(no output)"

        return Tool(
            name="python",
            description="Run Python code. Variables stay from one call to the next. Returns what it prints and the value of the last line.",
            parameters={
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The code to run."}},
                "required": ["code"],
            },
            function=python,
        )
