"""An agent as a program in any language: it gets the task as JSON on standard input and the endpoint in its environment
variables.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from strop.environments.agents.agent_environment import AgentFailed, read_result
from strop.environments.agents.agent_guardian import guard_group
from strop.environments.agents.agent_result import AgentResult
from strop.environments.agents.endpoint import Endpoint
from strop.safety.printable import shorten
from strop.types import Task

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
        raise AgentFailed(f"the agent {command[0]} cannot be started: {error.strerror or error}") from error
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
    result = AgentResult() if reward_from == "exit_code" else read_result(_last_json(output))
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


def _last_json(output: str) -> Any:
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
