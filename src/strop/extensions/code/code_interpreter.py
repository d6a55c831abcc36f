"""A Python interpreter as the other side of a conversation: NeMo-RL's environment ``code``."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar

from strop.environments.base import DatasetEnvironment, EnvironmentConfigError, PromptedTask, reward
from strop.extensions.code.python_cell import CellResult, run_cell
from strop.extensions.code.sandbox.base import Limits, SandboxSession
from strop.extensions.code.sandbox.sandbox_pool import get_sandbox
from strop.tools.shorten_middle import shorten_middle
from strop.types import Message, Messages, Rollout

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
        text = shorten_middle(result.value or result.error or "", self.max_result_chars)
        if not text:
            return ""
        return f"\n\n<result>\n{text}\n</result>" if "\n" in code or "\n" in text else f"<result>{text}</result>"
