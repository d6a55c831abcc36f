"""``type: agent``: an agent that is a Python function, or a command in any language."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from strop.endings import Ending, RolloutFailed
from strop.environments.base import EnvironmentConfigError, PromptedTask, import_user_code
from strop.environments.function_environment import FunctionEnvironment
from strop.environments.rewards import RewardFunction, RewardMark
from strop.extensions.agents.agent_environment import AgentEnvironment, AgentFailed, AgentResult, current_result, read_result
from strop.extensions.agents.agent_guardian import guard_group
from strop.extensions.agents.endpoint import Endpoint
from strop.packages import find_program
from strop.safety.printable import shorten
from strop.types import Rollout, Task

KEPT_OUTPUT = 64 * 1024  # last bytes kept of standard output and of standard error
_GRACE_SECONDS = 2.0  # between the termination signal and the kill


async def run_command_agent(
    command: Sequence[str], task: Task, endpoint: Endpoint, *, reward_from: str, directory: str | None
) -> AgentResult:
    """Run a command for one task. When this returns, the command and its child processes have ended. Raises AgentFailed."""
    environment = {**os.environ, **endpoint.environ}
    try:
        process = await _start(command, environment, directory)
    except OSError as error:
        raise RolloutFailed(f"the agent {command[0]} cannot be started: {error.strerror or error}", Ending.ENVIRONMENT) from error
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    readers = [asyncio.ensure_future(_read_end(stream)) for stream in (process.stdout, process.stderr)]
    with guard_group(process.pid):
        try:
            with suppress(ConnectionError):
                process.stdin.write(format_task(task).encode() + b"\n")
                await process.stdin.drain()
            process.stdin.close()
            code = await _wait_for_exit(process)
        finally:
            await _end_group(process)
            output, errors = await _collect(readers)
    shown = f"{output}\n--- standard error\n{errors}" if errors.strip() else output
    if reward_from == "exit_code" and code in (0, 1):
        return AgentResult(reward=float(code == 0), output=shown)
    if code:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise AgentFailed(
            f"the agent {command[0]} {how}: {shorten((errors or output).strip()[-500:] or 'it printed nothing', 500)}"
        )
    result = AgentResult() if reward_from == "exit_code" else read_result(last_json(output))
    return replace(result, output=shown)


async def _start(command: Sequence[str], environment: dict[str, str], directory: str | None) -> asyncio.subprocess.Process:
    """Start a process in its own group. asyncio never returns the process if this is cancelled meanwhile, so starting is always
    completed.
    """
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            cwd=directory,
            start_new_session=True,
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with suppress(OSError):
            await _end_group(await starting)
        raise


def format_task(task: Task) -> str:
    """Write a task as JSON: id, question, answer, metadata, and the messages of its prompt if it has any."""
    messages = [message.as_dict() for message in getattr(task, "messages", ())]
    values: dict[str, Any] = {"id": task.id, "question": task.question, "answer": task.answer, "metadata": dict(task.metadata)}
    return json.dumps({**values, "messages": messages} if messages else values, default=str)


def last_json(output: str) -> Any:
    """Return the reward in the last line of an output, a number or an object with a reward; None if there is none."""
    lines = [line for line in output.splitlines() if line.strip()]
    try:
        found = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, bool | int | float | dict) else None


async def _read_end(stream: asyncio.StreamReader) -> bytes:
    """Read to the end. Returns the last bytes."""
    kept = b""
    while part := await stream.read(65536):
        kept = (kept + part)[-KEPT_OUTPUT:]
    return kept


async def _collect(readers: Sequence[asyncio.Future[bytes]]) -> list[str]:
    """Return what was read, even if a process that left the group keeps a stream open."""
    await asyncio.wait(readers, timeout=_GRACE_SECONDS)
    texts = [reader.result() if reader.done() and not reader.cancelled() else b"" for reader in readers]
    for reader in readers:
        reader.cancel()
    return [text.decode(errors="replace") for text in texts]


async def _wait_for_exit(process: asyncio.subprocess.Process) -> int:
    """Return the exit code of a process. ``process.wait`` would also wait for all processes that keep its output open."""
    delay = 0.002
    while process.returncode is None:
        await asyncio.sleep(delay)
        delay = min(2 * delay, 0.05)
    return process.returncode


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End a process and everything in its group."""
    with suppress(ProcessLookupError):
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(_wait_for_exit(process), _GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await _wait_for_exit(process)


SCORE = "score"  # the reward returned by the agent


def score(task: Task, rollout: Rollout) -> float | None:
    """Return the agent's reward; 0 if its last request was refused because of the length, the number of turns or the budget."""
    result = current_result()
    if result.unscored:
        return None
    if result.reward is None and rollout.ending not in ("context", "turns", "budget"):
        raise AgentFailed(
            f"the agent returned no reward on task {task.id!r}: return a number or a mapping with reward (a command: as JSON in its last "
            "line of output), or set env.ALIAS.reward to a function"
        )
    return result.reward or 0.0


@dataclass(frozen=True, kw_only=True)
class ExternalAgent(FunctionEnvironment, AgentEnvironment[PromptedTask]):
    """Rows of a dataset, each handled by an agent. The reward is the agent's result or comes from functions (``reward``,
    ``rewards``), which read the agent's result from ``strop.extensions.agents.agent_environment.current_result()``."""

    agent: Any = None  # file.py:function or module:function of (task, endpoint), async or not
    command: list[str] | None = None  # a program and its arguments
    directory: str | None = None  # where the command runs; null is the run's working directory
    reward_from: Literal["stdout", "exit_code"] = (
        "stdout"  # of a command: JSON in the last line, or 1 for exit code 0 and 0 for 1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.agent is None) == (not self.command):
            raise EnvironmentConfigError(
                "set agent to a function, as file.py:name or module:name, or command to a program and its arguments, and not both"
            )
        if self.directory is not None and not Path(self.directory).is_dir():
            raise EnvironmentConfigError(
                f"directory is {self.directory!r}, and there is no such folder; set it to where the command runs"
            )
        if self.command and find_program(self.command[0], self.directory) is None:
            raise EnvironmentConfigError(
                f"command starts {self.command[0]!r}, but there is no such program here; install it, or name it by its path"
            )
        if self.command is None:
            self._function  # noqa: B018 what cannot be imported is an error when the run starts

    @cached_property
    def _function(self) -> Callable[[Any, Endpoint], Any]:
        function = import_user_code(self.agent) if isinstance(self.agent, str) else self.agent
        if not callable(function):
            raise EnvironmentConfigError(f"the agent {self.agent!r} is {function!r:.80}, not a function of (task, endpoint)")
        found: Callable[[Any, Endpoint], Any] = function
        return found

    @cached_property
    def reward_functions(self) -> Mapping[str, RewardFunction]:
        if self.reward is None and self.rewards is None:
            return {SCORE: RewardFunction(score, RewardMark(accuracy=True), "the agent's result")}
        return super().reward_functions

    @property
    def declares_accuracy(self) -> bool:
        return (self.reward is not None or self.rewards is not None) and super().declares_accuracy

    @classmethod
    def list_marks(cls, options: Mapping[str, Any]) -> Mapping[str, RewardMark]:
        given = {name: options[name] for name in ("reward", "rewards") if options.get(name) is not None}
        made = cls(agent=print, **given)  # the agent itself does not matter here
        return {name: each.mark for name, each in made.reward_functions.items()}

    async def run(self, task: PromptedTask, endpoint: Endpoint) -> Any:
        if self.command is not None:
            return await run_command_agent(self.command, task, endpoint, reward_from=self.reward_from, directory=self.directory)
        if inspect.iscoroutinefunction(self._function):
            return await self._function(task, endpoint)
        returned = await run_in_own_thread(self._function, task, endpoint)
        return await returned if inspect.isawaitable(returned) else returned


async def run_in_own_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Await a blocking function in a separate thread, which does not block other episodes. A thread that is no longer awaited
    keeps running.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.done():  # cancelled
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error if isinstance(error, Exception) else AgentFailed(f"the agent raised {error!r}"))

    def work() -> None:
        value, error = None, None
        try:
            value = function(*arguments)
        except BaseException as raised:  # a thread must not end silently
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=copy_context().run, args=(work,), name="strop-agent", daemon=True).start()
    return await done
