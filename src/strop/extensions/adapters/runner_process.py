"""A library in a separate interpreter: a child process that any thread calls."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from strop import packages
from strop.endings import Ending, RolloutFailed
from strop.environments.base import EnvironmentConfigError
from strop.extensions.agents.agent_guardian import guard_group
from strop.safety.printable import shorten

FOLDER = Path(__file__).parent
KEPT_LINES = 30  # of what the process writes to standard error
LAST_WORDS_SECONDS = 2.0  # for what a process wrote before its end to be read; what it started may hold its stderr open
CLOSE_SECONDS = 12.0  # for the process to end what it started; then its process group is killed


class RunnerProcess:
    """``runner.py`` with one of its classes. It ends when this process does, also if that is killed."""

    def __init__(self, worker: str, library: str, module: str, python: str, *, path: Sequence[str] = ()) -> None:
        """``worker``: ``FILE:Class`` in this folder, which needs ``module`` of ``library``. Raises EnvironmentConfigError."""
        self.library, self.module, self.python = library, module, python or sys.executable
        joined = {  # libraries look for programs next to the interpreter
            "PYTHONPATH": [*path, os.environ.get("PYTHONPATH", "")],
            "PATH": [str(Path(self.python).parent), os.environ.get("PATH", "")],
        }
        environ = {**os.environ, **{name: os.pathsep.join(filter(None, parts)) for name, parts in joined.items()}}
        try:
            self._process = subprocess.Popen(
                [self.python, str(FOLDER / "runner.py"), str(FOLDER / worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environ,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentConfigError(f"python is {python!r}, which cannot be started: {error.strerror}") from error
        self._guard = ExitStack()
        self._guard.enter_context(guard_group(self._process.pid))
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._said: deque[str] = deque(maxlen=KEPT_LINES)
        self._errors = threading.Thread(target=self._read_errors, name=f"strop-{library}", daemon=True)
        self._errors.start()
        threading.Thread(target=self._read_answers, name=f"strop-{library}", daemon=True).start()

    def load(self, timeout_s: float, **arguments: Any) -> Any:
        """Call ``load`` of the worker. Raises EnvironmentConfigError, and ends the process, if that fails."""
        try:
            return self._send("load", **arguments)[1].result(timeout_s)
        except (RolloutFailed, TimeoutError) as error:
            self.close()
            if f"No module named '{self.module}'" in str(error):
                raise EnvironmentConfigError(explain_missing(self.python, self.library)) from error
            why = str(error) or f"it took longer than {timeout_s:g} s (start_timeout_s); it said last: {self._last_words()}"
            raise EnvironmentConfigError(f"{self.library} cannot load the environment: {shorten(why, 2000)}") from error

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
        """End the process and what it started."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._guard.close()

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
                future.set_exception(RolloutFailed(answer["error"], Ending.ERROR))
            else:
                future.set_result(answer["value"])
        self._errors.join(LAST_WORDS_SECONDS)  # here and not in _fail_all, which also runs on the event loop
        self._fail_all()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._said.extend(self._process.stderr)
        self._process.stderr.close()

    def _last_words(self) -> str:
        return "".join(list(self._said)).strip()[-1500:] or "nothing"

    def _fail_all(self) -> None:
        with self._lock:
            waiting, self._waiting = dict(self._waiting), {}
        for future in waiting.values():
            if future.set_running_or_notify_cancel():
                why = f"the process of {self.library} ended; it said last: {self._last_words()}"
                future.set_exception(RolloutFailed(why, Ending.ENVIRONMENT))


def require_module(python: str, library: str, module: str) -> None:
    """Raise EnvironmentConfigError if an interpreter, "" for this one, does not have a module."""
    interpreter = python or sys.executable
    try:
        found = packages.is_in(interpreter, module)
    except OSError as error:
        raise EnvironmentConfigError(f"python is {python!r}, which cannot be started: {error.strerror}") from error
    if not found:
        cause = None if python else ModuleNotFoundError(name=module)  # a dry run for other machines may assume it
        raise EnvironmentConfigError(explain_missing(interpreter, library)) from cause


def explain_missing(python: str, library: str) -> str:
    return (
        f"{python} has no {library}; {library} asks for other versions of packages than Strop: install it elsewhere and set python to that "
        "interpreter"
    )
