"""The sandbox of this machine: a pool of warm workers, for any thread and event loop.

run() -> a thread of the pool -> an idle worker, or a new one -> the job -> its result
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import PurePosixPath
from queue import Empty, LifoQueue
from typing import Any

from strop.base_config import validate_section
from strop.environments.resources import find_section
from strop.extensions.code.sandbox.base import ExitReason, Limits, Program, ProgramRunner, RunResult, SandboxError, SandboxFull
from strop.extensions.code.sandbox.launcher import LANGUAGES, PACKAGES, SandboxWorker, WorkerDied, check_level, find_commands
from strop.extensions.code.sandbox.sandbox_config import SandboxConfig, SandboxLevel
from strop.hardware import total_memory
from strop.safety.printable import redact_text

GRACE_S = 20.0  # after a program's limits, for a busy machine and a compiler
DEFAULT_LIMITS = Limits()
WEAKNESSES: dict[SandboxLevel, str] = {
    "namespaces": "",
    "seccomp": ": they can read the files of this machine",
    "limits": ": they can do what this run can",
}


def get_sandbox() -> ProgramRunner:
    """Return this process's sandbox, as configured by the section ``sandbox``. A forked process gets its own."""
    return _make_sandbox(os.getpid(), find_section(SandboxConfig))


@asynccontextmanager
async def open_sandbox() -> AsyncIterator[str]:
    """Try this process's sandbox, and close it at the end. Yields where programs run. Raises SandboxError if it cannot be had."""
    where = await try_sandbox()
    sandbox = get_sandbox()
    try:
        yield where
    finally:
        _make_sandbox.cache_clear()  # first, so that no caller gets a closed sandbox
        await sandbox.close()


async def try_sandbox() -> str:
    """Run a program in this process's sandbox. Return in words where programs run. Raises SandboxError if it cannot be had."""
    config = find_section(SandboxConfig)
    result = await get_sandbox().run(Program(source="print('ready')"))
    if result.stdout.strip() != "ready":
        raise SandboxError(
            f"the sandbox does not run Python: {result.stderr.strip()[-500:] or result.reason}; see strop sandbox check"
        )
    where = redact_text(", ".join(config.url)) if config.url else f"in the sandbox of this machine, sandbox.level={config.level}"
    return f"programs of the policy run {'at ' if config.url else ''}{where}{'' if config.url else WEAKNESSES[config.level]}"


@lru_cache(maxsize=8)
def _make_sandbox(process: int, config: SandboxConfig) -> ProgramRunner:
    if config.url:
        from strop.extensions.code.sandbox.remote_sandbox import RemoteSandbox

        return RemoteSandbox(config.url)
    check_level(config.level)
    return SandboxPool(config)


class SandboxPool:
    """Runs programs in worker processes of this machine."""

    def __init__(self, config: SandboxConfig | None = None) -> None:
        config = self.config = config or validate_section(SandboxConfig, {})
        self.commands = find_commands()
        self.size = config.workers or len(os.sched_getaffinity(0))
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="sandbox")
        self._session_threads = ThreadPoolExecutor(min(config.sessions, 64), thread_name_prefix="sandbox_session")
        self._idle: LifoQueue[SandboxWorker] = LifoQueue()
        self._lock = threading.Lock()
        self._busy: set[SandboxWorker] = set()
        self._open_sessions = 0
        self._sessions: set[PoolSession] = set()
        self.memory_mb = config.memory_mb or (total_memory() >> 21) or 32_768  # MB of open interpreters together
        self._closed = False
        atexit.register(self._close)

    async def run(self, program: Program) -> RunResult:
        self._check(program.language, program.limits, program.files)
        request = {
            "language": program.language,
            "source": program.source,
            "stdin": program.stdin,
            "files": dict(program.files),
            "limits": asdict(program.limits),
            "session": False,
        }
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, request)

    @asynccontextmanager
    async def session(self, language: str = "python", limits: Limits = DEFAULT_LIMITS) -> AsyncIterator[PoolSession]:
        if language != "python":
            raise ValueError(f"a session is an interpreter of python; found {language!r}")
        self._check(language, limits, {})
        with self._lock:
            if self._open_sessions >= self.config.sessions:
                raise SandboxFull(
                    f"{self._open_sessions} interpreters are open, as many as sandbox.sessions allows; set it higher"
                )
            self._open_sessions += 1
        session = PoolSession(self, limits)
        with self._lock:
            self._sessions.add(session)
        try:
            yield session
        finally:
            with self._lock:
                self._open_sessions -= 1
                self._sessions.discard(session)
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._session_threads, session.end))

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        for worker in busy:
            with suppress(OSError):
                worker.channel.shutdown(2)  # its job ends, and the thread that waits for it sees that
        atexit.unregister(self._close)
        self._threads.shutdown(cancel_futures=True)
        self._session_threads.shutdown(cancel_futures=True)
        with suppress(Empty):
            while True:
                self._idle.get_nowait().close()

    def _check(self, language: str, limits: Limits, files: Mapping[str, str]) -> None:
        if language not in LANGUAGES:
            raise ValueError(f"the sandbox has no language {language!r}; it has {', '.join(LANGUAGES)}")
        if language not in self.commands:
            raise SandboxError(
                f"this machine has no {PACKAGES[language]}, so programs in {language} cannot run: install it (apt-get install "
                f"{PACKAGES[language]}), or set sandbox.url to a service that has it"
            )
        if self.config.level == "seccomp" and language != "python":
            raise SandboxError(
                f"sandbox.level=seccomp runs Python only, and this program is in {language}; set sandbox.level=namespaces"
            )
        for name, value in asdict(limits).items():
            if not 0 < value < 1 << 31:
                raise ValueError(f"the limit {name} is {value}; it must be positive")
        for name in files:
            if name.startswith("/") or not name.strip() or ".." in PurePosixPath(name).parts or "\0" in name:
                raise ValueError(f"the file {name!r:.100} is not inside the program's folder; write a relative path without ..")

    def bound_memory(self) -> None:
        """End the largest interpreters while those that wait for a call hold more than all may together."""
        with self._lock:
            held = sorted(self._sessions, key=lambda session: session.held, reverse=True)
        total = sum(session.held for session in held)
        for session in held:
            if total <= self.memory_mb << 20:
                return
            size = session.held
            why = (
                f"the open interpreters held {total >> 20} MB together, more than sandbox.memory_mb = {self.memory_mb}; the largest, with "
                f"{size >> 20} MB, was ended. Raise sandbox.memory_mb, or lower the memory_mb of the tool"
            )
            if session.give_up(why):
                total -= size

    # --- in a thread of the pool --------------------------------------------------------------------------------------------

    def take(self) -> SandboxWorker:
        """Return an idle worker, or a new one."""
        try:
            worker = self._idle.get_nowait()
        except Empty:
            worker = SandboxWorker(self.config)
        with self._lock:
            self._busy.add(worker)
            closed = self._closed
        if closed:
            self.drop(worker)
            raise SandboxError("the sandbox is closed")
        return worker

    def give(self, worker: SandboxWorker) -> None:
        with self._lock:
            self._busy.discard(worker)
            if not self._closed:
                self._idle.put(worker)
                return
        worker.close()

    def drop(self, worker: SandboxWorker) -> None:
        with self._lock:
            self._busy.discard(worker)
        worker.close()

    def _run(self, request: Mapping[str, Any]) -> RunResult:
        try:
            return self._try(request)
        except WorkerDied:  # killed from outside: once more with another
            try:
                return self._try(request)
            except WorkerDied as error:
                raise SandboxError(
                    f"two workers of the sandbox died, one after another ({error}): is the machine out of memory?"
                ) from error

    def _try(self, request: Mapping[str, Any]) -> RunResult:
        worker = self.take()
        limits = request["limits"]
        try:
            result = call_worker(worker, request, limits, 2 * limits["wall_s"] + GRACE_S)
        except BaseException:
            self.drop(worker)
            raise
        self.give(worker)
        return result


class PoolSession:
    """An interpreter in a separate worker, which starts with the first call."""

    def __init__(self, pool: SandboxPool, limits: Limits) -> None:
        self._pool, self._limits = pool, limits
        self._worker: SandboxWorker | None = None
        self._running = threading.Lock()
        self.held = 0  # bytes, when its last call had ended
        self._given_up = ""  # why it was ended between two calls

    async def run(self, source: str, *, wall_s: float | None = None) -> RunResult:
        return await asyncio.get_running_loop().run_in_executor(self._pool._session_threads, self._run, source, wall_s)

    def _run(self, source: str, wall_s: float | None) -> RunResult:
        result = self._run_alone(source, self._limits.wall_s if wall_s is None else wall_s)
        self._pool.bound_memory()
        return result

    def _run_alone(self, source: str, wall: float) -> RunResult:
        with self._running:
            if self._given_up:
                raise SandboxError(self._given_up)
            try:
                return self._call(source, wall)
            except WorkerDied as error:
                if error.lost_state:
                    raise SandboxError(
                        f"an interpreter was ended from outside ({error}), and its variables with it: is the machine out of memory?"
                    ) from error
            try:  # it had no variables yet: once more with another
                return self._call(source, wall)
            except WorkerDied as error:
                raise SandboxError(
                    f"two workers of the sandbox died, one after another ({error}): is the machine out of memory?"
                ) from error

    def _call(self, source: str, wall: float) -> RunResult:
        new = self._worker is None
        worker = self._worker or self._pool.take()
        request: dict[str, Any] = {"source": source, "wall_s": wall}
        limits = asdict(self._limits)
        if new:
            request |= {"language": "python", "stdin": "", "files": {}, "limits": limits, "session": True}
        try:
            result, held = call_session(worker, request, limits, wall + GRACE_S)
        except BaseException as error:
            self._worker = None
            self._pool.drop(worker)
            if isinstance(error, WorkerDied):
                error.lost_state = not new
            raise
        self._worker = None if held is None else worker
        self.held = held or 0
        if held is None:
            self._pool.give(worker)
        return result

    def give_up(self, why: str) -> bool:
        """End the interpreter, unless a call runs in it. The next call is an error that says why."""
        if not self._running.acquire(blocking=False):
            return False
        try:
            worker, self._worker, self.held, self._given_up = self._worker, None, 0, why
        finally:
            self._running.release()
        if worker is not None:
            self._pool.drop(worker)
        return True

    def end(self) -> None:
        """Close the interpreter."""
        with self._running:
            worker, self._worker = self._worker, None
            if worker is None:
                return
            try:
                worker.call({"close": True}, GRACE_S)
            except WorkerDied:
                self._pool.drop(worker)
            else:
                self._pool.give(worker)


def call_worker(worker: SandboxWorker, request: Mapping[str, Any], limits: Mapping[str, Any], timeout_s: float) -> RunResult:
    """Run a job in a worker, under the limits of its control group too."""
    return call_session(worker, request, limits, timeout_s)[0]


def call_session(
    worker: SandboxWorker, request: Mapping[str, Any], limits: Mapping[str, Any], timeout_s: float
) -> tuple[RunResult, int | None]:
    """Return the result of a call, and the bytes that its interpreter holds; None if it does not live on."""
    kills = 0
    if worker.cgroup is not None:
        compiles = request.get("language") in ("c", "cpp")
        worker.cgroup.limit(max(limits["memory_mb"], 512 if compiles else 0), max(limits["processes"], 16 if compiles else 0))
        kills = worker.cgroup.count_kills()
    answer = worker.call(request, timeout_s)
    out_of_memory = worker.cgroup is not None and worker.cgroup.count_kills() > kills
    if "died" in answer:
        reason = ExitReason.MEMORY if out_of_memory else ExitReason.SIGNAL
        return RunResult(reason=reason, exit_code=-9, stderr="the process that supervises the program died"), None
    alive, held = answer.pop("alive", False), answer.pop("held", 0)
    reason = ExitReason(answer.pop("reason"))
    if out_of_memory and reason in (ExitReason.SIGNAL, ExitReason.EXIT):
        reason = ExitReason.MEMORY
    return RunResult(reason=reason, **answer), held if alive else None
