"""The process in which verifiers runs, seen from here."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from strop.environments.base import EnvironmentConfigError
from strop.safety.printable import shorten

RUNNER = Path(__file__).with_name("verifiers_runner.py")
KEPT_LINES = 30  # of what the process writes to standard error


class VerifiersError(RuntimeError):
    """verifiers, or an environment of it, failed."""


class VerifiersProcess:
    """An interpreter with verifiers in it, asked from any thread. It ends when this process does."""

    def __init__(self, python: str, path: Sequence[str], config: Mapping[str, Any], *, start_timeout_s: float) -> None:
        """Start it and load the environment. Raises EnvironmentConfigError."""
        joined = {  # harnesses look for uv beside the interpreter
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
                future.set_exception(VerifiersError(answer["error"]))
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
                future.set_exception(VerifiersError(f"the process of verifiers ended; it said last: {said or 'nothing'}"))
