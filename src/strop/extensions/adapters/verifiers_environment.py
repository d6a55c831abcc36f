"""Environments of verifiers (its v1 interface: Task, Taskset, Env, Harness), run as they are; the policy is their model."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from strop.data.sources.records import is_held_out
from strop.data.sources.source import DataSource
from strop.endings import Ending, RolloutFailed
from strop.environments.base import EnvironmentConfigError, GeneratedTasks, reward
from strop.extensions.agents.agent_environment import AgentEnvironment, AgentResult, current_result
from strop.extensions.agents.endpoint import Endpoint
from strop.safety.printable import shorten
from strop.types import Rollout, Task

RUNNER = Path(__file__).with_name("verifiers_runner.py")
KEPT_LINES = 30  # of what the process writes to standard error


class VerifiersError(RolloutFailed):
    """verifiers, or an environment of it, failed."""


class VerifiersProcess:
    """An interpreter with verifiers in it, asked from any thread. It ends when this process does."""

    def __init__(self, python: str, path: Sequence[str], config: Mapping[str, Any], *, start_timeout_s: float) -> None:
        """Start it and load the environment. Raises EnvironmentConfigError."""
        joined = {  # harnesses look for uv next to the interpreter
            "PYTHONPATH": [*path, os.environ.get("PYTHONPATH", "")],
            "PATH": [str(Path(python or sys.executable).parent), os.environ.get("PATH", "")],
        }
        environ = {**os.environ, **{name: os.pathsep.join(filter(None, parts)) for name, parts in joined.items()}}
        try:
            self._process = subprocess.Popen(
                [python or sys.executable, str(RUNNER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environ,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentConfigError(f"python is {python!r}, which cannot be started: {error.strerror}") from error
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._said: deque[str] = deque(maxlen=KEPT_LINES)
        for work in (self._read_answers, self._read_errors):
            threading.Thread(target=work, name="strop-verifiers", daemon=True).start()
        try:
            self._send("load", config=dict(config))[1].result(start_timeout_s)
        except (VerifiersError, TimeoutError) as error:
            self.close()
            if "No module named 'verifiers'" in str(error):
                hint = "; verifiers asks for other versions of packages than Strop: install it elsewhere and set python to that interpreter"
                raise EnvironmentConfigError(f"{python or sys.executable} has no verifiers{hint}") from error
            raise EnvironmentConfigError(
                f"verifiers cannot load the environment: {shorten(str(error) or 'it took too long', 1000)}"
            ) from error

    def call(self, method: str, **arguments: Any) -> Any:
        return self._send(method, **arguments)[1].result()

    async def call_async(self, method: str, **arguments: Any) -> Any:
        number, future = self._send(method, **arguments)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._write({"id": next(self._numbers), "call": "cancel", "of": number})
            raise

    def close(self) -> None:
        """End the process; it ends what it started."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _send(self, method: str, **arguments: Any) -> tuple[int, Future[Any]]:
        number, future = next(self._numbers), Future[Any]()
        with self._lock:
            self._waiting[number] = future
        self._write({"id": number, "call": method, **arguments})
        return number, future

    def _write(self, request: Mapping[str, Any]) -> None:
        try:
            with self._lock:
                assert self._process.stdin is not None
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
        except (OSError, ValueError):
            self._fail_all()

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._lock:
                future = self._waiting.pop(answer["id"], None)
            if future is None or not future.set_running_or_notify_cancel():
                continue
            if "error" in answer:
                future.set_exception(VerifiersError(answer["error"], Ending.ERROR))
            else:
                future.set_result(answer["value"])
        self._fail_all()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._said.extend(self._process.stderr)
        self._process.stderr.close()

    def _fail_all(self) -> None:
        with self._lock:
            waiting, self._waiting = dict(self._waiting), {}
        said = "".join(self._said).strip()[-1500:]
        for future in waiting.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(
                    VerifiersError(f"the process of verifiers ended; it said last: {said or 'nothing'}", Ending.ENVIRONMENT)
                )


@dataclass(frozen=True, kw_only=True)
class PlacedTask(Task):
    """A task that lies in another process."""

    index: int


@dataclass(frozen=True, kw_only=True)
class VerifiersEnvironment(AgentEnvironment[PlacedTask]):
    """An environment of verifiers. Its harness asks the policy, and the reward is that of its task."""

    # The section [env] of verifiers' configuration, such as {taskset: {id: gsm8k}, agent: {harness: {id: null}}}. The runtime of the agent
    # is subprocess unless it names one.
    env: Mapping[str, Any] = field(default_factory=dict)
    python: str = ""  # an interpreter that has verifiers and the environment; "" for this one
    path: tuple[str, ...] = ()  # folders with packages of environments that are not installed
    held_out: float = 0.0  # share of the tasks that is for validation and never trained on; 0: both see all tasks
    start_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.env.get("taskset") or {}).get("id"):
            raise EnvironmentConfigError(
                "env.taskset.id is not set; it names the task set, as --env.taskset.id of verifiers does"
            )

    @cached_property
    def process(self) -> VerifiersProcess:
        process = VerifiersProcess(self.python, self.path, self.env, start_timeout_s=self.start_timeout_s)
        weakref.finalize(self, process.close)
        return process

    def tasks(self, data: DataSource) -> Sequence[PlacedTask]:
        found = self.process.call("tasks", size=None)
        indices = [index for index, task in enumerate(found) if self._is_used(task["key"], data)][: data.size]
        if not indices:
            raise EnvironmentConfigError(
                f"no task of {self.env['taskset']['id']} is left for {data.part}: it has {len(found)}, and held_out is {self.held_out}"
            )

        def make(position: int) -> PlacedTask:
            index = indices[position]
            return PlacedTask(id=found[index]["key"][:16], question=found[index]["question"], index=index)

        return GeneratedTasks(len(indices), make)

    def _is_used(self, key: str, data: DataSource) -> bool:
        return not self.held_out or is_held_out(key, self.held_out) == data.held_out

    async def run(self, task: PlacedTask, endpoint: Endpoint) -> AgentResult:
        result = await self.process.call_async(
            "run", index=task.index, base_url=endpoint.base_url, api_key=endpoint.api_key, model=endpoint.model
        )
        return AgentResult(reward=result["reward"], metrics=result["metrics"])

    @reward(weight=1.0, accuracy=True)
    def score(self, task: PlacedTask, rollout: Rollout) -> float:
        """The sum of the task's rewards with their weights, as verifiers has it; 0 if the conversation became too long."""
        return current_result().reward or 0.0
