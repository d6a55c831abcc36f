"""A Python interpreter in the sandbox: as the other side of a conversation (NeMo-RL's environment ``code``), and as a tool."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar

from strop.environments.base import DatasetEnvironment, EnvironmentConfigError, PromptedTask, reward
from strop.extensions.code.sandbox.base import ExitReason, Limits, SandboxSession
from strop.extensions.code.sandbox.sandbox_pool import get_sandbox
from strop.safety.printable import shorten
from strop.tools.base import Tool
from strop.types import Message, Messages, Rollout

# Runs in the sandbox, in the session's own variables; the last line of its output is what it found. A program can write such a line itself:
# what a policy is told of its own program is all that depends on it.
_CELL = """
def _strop_cell(code, namespace):
    import ast, json, linecache, pprint, sys, traceback
    found = {"evaluated": False, "value": None, "error": None, "traceback": ""}
    linecache.cache["<cell>"] = (len(code), None, code.splitlines(True), "<cell>")
    try:
        tree = ast.parse(code, "<cell>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<cell>", "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
            found["evaluated"] = True
            if value is not None:
                found["value"] = pprint.pformat(value)
    except BaseException as error:
        found["error"] = repr(error)
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != "<cell>":
            frames = frames.tb_next
        found["traceback"] = "".join(traceback.format_exception(type(error), error, frames, limit=-4)).rstrip()
    sys.stdout.flush()
    print("\\n" + json.dumps(found), flush=True)
"""
_ENDINGS = {
    ExitReason.TIME: "The time limit of {wall_s:g} s was reached. The interpreter starts again, without its variables.",
    ExitReason.MEMORY: "The memory limit was reached. The interpreter starts again, without its variables.",
    ExitReason.OUTPUT: "The limit on output was reached. The interpreter starts again, without its variables.",
}


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """What a call printed, and what its last expression is."""

    stdout: str = ""
    evaluated: bool = False  # it ended with an expression
    value: str | None = None  # of that expression, unless it is None
    error: str | None = None
    traceback: str = ""

    def shorten(self, limit: int, *, printed: bool = True) -> str:
        """Return what a policy reads of it, cut in the middle where it is long."""
        parts = [self.stdout if printed else "", self.value or "", self.traceback]
        return shorten("\n".join(part.rstrip("\n") for part in parts if part.strip()), limit, around="\n")


async def run_cell(session: SandboxSession, code: str, *, wall_s: float | None = None) -> CellResult:
    """Run code as a cell of a notebook. Nothing that it does raises; raises SandboxError if the sandbox fails."""
    result = await session.run(f"{_CELL}\n_strop_cell({json.dumps(code)}, globals())\n", wall_s=wall_s)
    stdout, _, last = result.stdout.rstrip("\n").rpartition("\n")
    if result.reason in _ENDINGS:
        ending = _ENDINGS[result.reason].format(wall_s=wall_s or result.wall_s)
        return CellResult(stdout=result.stdout, error=ending, traceback=ending)
    try:
        found = json.loads(last)
        return CellResult(
            stdout=stdout.removesuffix("\n") + (f"\n{result.stderr}" if result.stderr else ""),
            evaluated=bool(found["evaluated"]),
            value=None if found["value"] is None else str(found["value"]),
            error=None if found["error"] is None else str(found["error"]),
            traceback=str(found["traceback"]),
        )
    except (ValueError, TypeError, LookupError, RecursionError):
        ending = f"The interpreter ended ({result.reason}, exit code {result.exit_code}) and starts again, without its variables."
        return CellResult(stdout=result.stdout + result.stderr, error=ending, traceback=ending)


_CODE = re.compile(r"<code>(.*)</code>(.*)", re.DOTALL)


@dataclass
class _Conversation:
    session: SandboxSession
    last: str = ""  # the value of the last expression


_conversation: ContextVar[_Conversation] = ContextVar("code_interpreter")


@dataclass(frozen=True, kw_only=True)
class CodeInterpreter(DatasetEnvironment):
    """Runs what a turn has in ``<code>...</code>``, and appends the value of its last expression as ``<result>...</result>``.

    Variables and files stay for the conversation. ``policy.generation.stop_strings: ["</code>"]`` ends a turn where its code ends.
    """

    terminate_on_evaluation: bool = True  # the episode ends when a turn's code ends with an expression that has a value
    role: str = "user"  # of the messages with results
    timeout_s: float = 10.0  # of one turn's code
    memory_mb: int = 256
    max_result_chars: int = 4000

    needs_answers: ClassVar[bool] = False
    needed_resources: ClassVar[tuple[str, ...]] = ("sandbox",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.timeout_s, self.memory_mb, self.max_result_chars) <= 0:
            raise EnvironmentConfigError("timeout_s, memory_mb and max_result_chars must be positive")

    def session(self, task: PromptedTask) -> AbstractAsyncContextManager[None]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[None]:
            limits = Limits(cpu_s=self.timeout_s, wall_s=self.timeout_s, memory_mb=self.memory_mb)
            async with get_sandbox().session("python", limits) as session:
                token = _conversation.set(_Conversation(session))
                try:
                    yield
                finally:
                    _conversation.reset(token)

        return opened()

    def reference_turns(self, task: PromptedTask) -> Sequence[str]:
        return [f"<code>{task.answer!r}</code>"] if task.answer else ()

    async def respond(self, task: PromptedTask, rollout: Rollout) -> Messages | None:
        conversation = _conversation.get()
        found = _CODE.search(rollout.content)
        if not found:
            return (Message(self.role, ""),)
        code, rest = found.groups()
        result = await run_cell(conversation.session, code)
        rollout.metrics["code_runs"] = rollout.metrics.get("code_runs", 0) + 1
        if result.evaluated:
            conversation.last = result.value or ""
            if self.terminate_on_evaluation:
                return None
        return (Message(self.role, self._word_result(result, code).removeprefix(rest)),)

    @reward(weight=1.0, accuracy=True)
    async def correct(self, task: PromptedTask, rollout: Rollout) -> bool:
        """Whether the last value is the reference answer, where the data has one."""
        last = _conversation.get().last
        return bool(task.answer) and last.strip() in (task.answer.strip(), repr(task.answer))

    def _word_result(self, result: CellResult, code: str) -> str:
        text = shorten(result.value or result.error or "", self.max_result_chars, around="\n")
        if not text:
            return ""
        return f"\n\n<result>\n{text}\n</result>" if "\n" in code or "\n" in text else f"<result>{text}</result>"


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
