"""Tools that are a Python process in the sandbox of the episode: a notebook that keeps its variables, and a browser of text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import ClassVar

from strop.extensions.sandboxes.base import CommandResult, ExitReason, SandboxCommand
from strop.extensions.sandboxes.task_sandbox import current_sandbox, failing_as_call, make_text_tool, open_tools
from strop.extensions.sandboxes.trees import write_files
from strop.extensions.tasks.base import read_inside
from strop.safety.printable import shorten
from strop.tools.base import Tool

HERE = "/tmp/strop_tools"
_END = 'kill -9 "$(cat $0.pid)"; rm -f $0'
_BROWSER = f"import sys; sys.path.insert(0, {HERE!r}); from text_browser import Browser; browser = Browser()"


@dataclass(frozen=True, kw_only=True)
class NotebookTool:
    """``python(code)``: a cell of a notebook in the sandbox of the episode's task. Variables and files stay."""

    needed_resources: ClassVar[tuple[str, ...]] = ("sandboxes",)
    timeout_s: float = 50.0  # of a cell, after which Python starts again, without its variables
    max_output_chars: int = 4000

    def open(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        kernel = Kernel("notebook", self.timeout_s, self.max_output_chars)

        async def python(code: str) -> str:
            return await kernel.run(code)

        description = (
            "Run Python code. Variables stay from one call to the next. Returns what it prints and the value of the last line."
        )
        return open_tools(make_text_tool("python", description, {"code": "The code to run."}, python))


@dataclass(frozen=True, kw_only=True)
class BrowserTool:
    """``open_page(address)``, ``click(what)``, ``fill(field, value)``: a browser without scripts in the sandbox of the episode's task."""

    needed_resources: ClassVar[tuple[str, ...]] = ("sandboxes",)
    timeout_s: float = 50.0
    max_output_chars: int = 4000

    def open(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        kernel = Kernel("browser", self.timeout_s, self.max_output_chars, ("text_browser.py",), _BROWSER)

        async def open_page(address: str) -> str:
            return await kernel.run(f"print(browser.open({address!r}))")

        async def click(what: str) -> str:
            return await kernel.run(f"print(browser.click({what!r}))")

        async def fill(field: str, value: str) -> str:
            return await kernel.run(f"print(browser.fill({field!r}, {value!r}))")

        return open_tools(
            make_text_tool(
                "open_page", "Open a page. Returns its text.", {"address": "Such as http://127.0.0.1:8000."}, open_page
            ),
            make_text_tool(
                "click", "Follow a link or press a button.", {"what": "Number or label of a link, or label of a button."}, click
            ),
            make_text_tool("fill", "Fill in a field of a form.", {"field": "Its name.", "value": "The text."}, fill),
        )


@dataclass
class Kernel:
    """A process that keeps its variables, started with the first call (``inside/kernel.py``)."""

    name: str
    timeout_s: float
    max_chars: int
    modules: tuple[str, ...] = ()
    first: str = ""  # run before the first cell
    started: bool = False

    async def run(self, code: str) -> str:
        """Run a cell. Return its output. Raises ToolError if it cannot run, SandboxFailure if the sandbox fails."""
        with failing_as_call():
            if not self.started:
                sandbox = await current_sandbox().open()
                await write_files(sandbox, {f"{HERE}/{name}": read_inside(name) for name in ("kernel.py", *self.modules)})
                self.started = True
                if self.first:
                    await self._send(self.first)
            result = await self._send(code)
            if result.succeeded:
                return (
                    shorten(result.stdout.decode("utf-8", "replace").rstrip("\n"), self.max_chars, around="\n") or "(no output)"
                )
            await self._send("", ("sh", "-c", _END, f"{HERE}/{self.name}"))
            self.started = False
        why = f"reached its limit of {self.timeout_s:g} s" if result.reason == ExitReason.TIME else f"was ended ({result.reason})"
        return f"The process {why}. It starts again, without its variables."

    async def _send(self, code: str, argv: tuple[str, ...] = ()) -> CommandResult:
        episode = current_sandbox()
        argv = argv or ("python3", f"{HERE}/kernel.py", f"{HERE}/{self.name}")
        command = SandboxCommand(argv=argv, stdin=code.encode(), cwd=episode.folder, wall_s=self.timeout_s, output_kb=4096)
        return await (await episode.open()).exec(command)
