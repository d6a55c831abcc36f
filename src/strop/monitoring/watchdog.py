"""The watchdog: a thread that reports waits over their limits, each with its chain, and writes ``status.json``.

It is a thread instead of an asyncio task because the event loop itself may block, which a heartbeat from the loop reveals.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib.metadata
import inspect
import logging
import os
import platform
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from strop.base_config import fields_of, validate_section
from strop.monitoring.logger_config import WatchdogConfig
from strop.monitoring.trackers.base import NullTracker
from strop.monitoring.waits import (
    LogEntry,
    Status,
    StatusState,
    Wait,
    describe_wait,
    process_start_time,
    snapshot_waits,
    write_status,
)
from strop.safety.exits import exit_process
from strop.safety.printable import describe_command
from strop.user_code import describe_error, find_user_place

MAX_WAITS_REPORTED = 5  # in one report


@dataclass(frozen=True)
class Stall:
    """Waits of one kind that exceed their limit, the longest first."""

    kind: str
    limit: float
    waits: tuple[Wait, ...]
    loop_blocked: float | None = None  # seconds for which the event loop has been blocked in the last of them

    @property
    def seconds(self) -> float:
        return max([self.loop_blocked or 0.0, *(wait.seconds for wait in self.waits)])


def find_stalls(
    waits: Sequence[Wait], limits: WatchdogConfig, *, loop_thread: int, loop_blocked: float | None = None
) -> list[Stall]:
    """Return the waits over their limits.

    ``loop_blocked``: seconds for which the event loop, in ``loop_thread``, has been blocked; None: it runs.

    While it is blocked, report only the task that holds it, because other tasks' waits may already be done.
    """
    candidates = waits if loop_blocked is None else [wait for wait in waits if wait.thread != loop_thread]
    by_kind: dict[str, list[Wait]] = {}
    for wait in _innermost_overdue(candidates, waits):
        by_kind.setdefault(wait.kind or wait.on, []).append(wait)
    stalls = [
        Stall(kind, min(wait.limit or 0.0 for wait in group), tuple(sorted(group, key=lambda wait: -wait.seconds)))
        for kind, group in by_kind.items()
    ]
    return stalls if loop_blocked is None else [*stalls, *_find_loop_stall(waits, limits, loop_blocked)]


def _find_loop_stall(waits: Sequence[Wait], limits: WatchdogConfig, loop_blocked: float) -> list[Stall]:
    running = [wait for wait in waits if wait.running]
    limited = [wait for wait in running if wait.limit is not None]
    if limited:
        wait = limited[-1]
        return [Stall(wait.kind or wait.on, wait.limit or 0.0, (wait,), loop_blocked)] if wait.overdue else []
    return (
        [Stall("event_loop", limits.event_loop_seconds, tuple(running[-1:]), loop_blocked)]
        if 0 < limits.event_loop_seconds < loop_blocked
        else []
    )


def _innermost_overdue(candidates: Iterable[Wait], waits: Sequence[Wait]) -> list[Wait]:
    """Return the waits over their limits, except those that only wait for another such wait."""
    by_number = {wait.number: wait for wait in waits}
    overdue = [wait for wait in candidates if wait.overdue]
    outer: set[int] = set()
    for wait in overdue:
        parent = wait.parent
        while parent is not None and parent in by_number and parent not in outer:
            outer.add(parent)
            parent = by_number[parent].parent
    return [wait for wait in overdue if wait.number not in outer]


def format_report(stall: Stall, waits: Sequence[Wait], step: int) -> str:
    """Format a stall for the user; the first line has the longest wait."""
    key = f" (watchdog.{stall.kind}_seconds)" if f"{stall.kind}_seconds" in fields_of(WatchdogConfig) else ""
    prefix = f"step {step} has waited longer than the limit of {stall.limit:g} s{key}: "
    chains = [
        f"{describe_wait(find_deepest_wait(wait, waits), waits)}, for {wait.seconds:.1f} s"
        for wait in stall.waits[:MAX_WAITS_REPORTED]
    ]
    lines = [prefix + (chains[0] if chains else "the event loop"), *(f"  also {chain}" for chain in chains[1:])]
    if stall.loop_blocked is not None:
        lines[0] += f"; this has blocked the event loop for {stall.loop_blocked:.1f} s, and nothing else runs"
    if (more := len(stall.waits) - MAX_WAITS_REPORTED) > 0:
        lines.append(f"  and {more} more")
    return "\n".join(lines)


def find_deepest_wait(wait: Wait, waits: Sequence[Wait]) -> Wait:
    """Follow the oldest child of each wait down to the innermost one."""
    children: dict[int, Wait] = {}
    for other in waits:
        if other.parent is not None:
            children.setdefault(other.parent, other)
    seen = {wait.number}
    while (child := children.get(wait.number)) is not None and child.number not in seen:
        seen.add(child.number)
        wait = child
    return wait


def select_longest_waits(waits: Sequence[Wait], count: int) -> tuple[Wait, ...]:
    """Return the ``count`` longest innermost waits and their ancestors, in the order in which they began."""
    by_number = {wait.number: wait for wait in waits}
    parents = {wait.parent for wait in waits}
    selected: set[int] = set()
    for wait in sorted((wait for wait in waits if wait.number not in parents), key=lambda wait: -wait.seconds)[:count]:
        number: int | None = wait.number
        while number is not None and number in by_number and number not in selected:
            selected.add(number)
            number = by_number[number].parent
    return tuple(wait for wait in waits if wait.number in selected)


log = logging.getLogger(__name__)

MAX_WAITS_STORED = 100  # the longest innermost waits, stored in status.json
SHUTDOWN_SECONDS = 30.0  # seconds that a cancelled run has to end


class WatchdogTimeout(TimeoutError):
    """A wait took longer than watchdog.stop_after_seconds. The message has its chain."""


@dataclass
class Backoff:
    """Limits reports of one kind of stall to doubling intervals."""

    next_at: float = 0.0
    delay: float = 0.0

    def due(self, now: float, limit: float) -> bool:
        if now < self.next_at:
            return False
        self.delay = max(2 * self.delay, limit)
        self.next_at = now + self.delay
        return True


class Watchdog:
    """Watches the run inside a ``with`` block, in a running event loop. Add ``status_tracker`` to the run's trackers."""

    def __init__(
        self,
        folder: Path,
        *,
        note: Callable[[str], None],
        config: WatchdogConfig | None = None,
        checkpoints: str | None = None,
    ) -> None:
        """Configure the watchdog.

        Args:
            folder: The run's log folder.
            note: The trackers' ``note``, called in the event loop.
            config: The limits of waits, how often to look, and when to end the run with WatchdogTimeout.
            checkpoints: The checkpoint folder, recorded in ``status.json`` for ``strop doctor``.
        """
        self.status_tracker = StatusTracker()
        self._folder, self._note = Path(folder).resolve(), note
        self._checkpoints = None if checkpoints is None else str(Path(checkpoints).resolve())
        self._stacks: Path | None = None
        self._limits = config or validate_section(WatchdogConfig, {})
        self._interval, self._stop_after = self._limits.interval_seconds, self._limits.stop_after_seconds
        self._reports: deque[LogEntry] = deque(maxlen=MAX_ENTRIES)
        self._backoff: dict[str, Backoff] = {}
        self._timeout: WatchdogTimeout | None = None
        self._give_up_at = float("inf")
        self._unreliable_until = 0.0  # after a blocked event loop, overdue tasks may not have run yet: wait until then
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._loop_thread, self._started = threading.get_ident(), time.time()
        self._beat_interval = min(1.0, self._interval / 4)
        self._heartbeat()
        self._thread = threading.Thread(target=self._run, name="strop-watchdog", daemon=True)
        self._write("running", ())
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join(timeout=10)
        self._timer.cancel()
        timeout = self._timeout if isinstance(error, asyncio.CancelledError) else None
        cause = timeout or error
        state: StatusState = "finished" if cause is None else "failed" if isinstance(cause, Exception) else "interrupted"
        with suppress(OSError):
            place = None if cause is None else find_user_place(cause)
            said = None if cause is None or (state == "interrupted" and place is None) else describe_error(cause)
            self._write(state, (), error=said, traceback=None if place is None else place.traceback)
        if timeout is not None:
            raise timeout from None

    # --- in the event loop ---

    def _heartbeat(self) -> None:
        self._last_beat = time.monotonic()
        self._timer = self._loop.call_later(self._beat_interval, self._heartbeat)

    # --- in the thread ---

    def _run(self) -> None:
        failed = False
        while not self._stopped.wait(self._interval):
            try:
                self._check()
            except Exception as error:  # a failing watchdog must not stop the run
                log.log(logging.DEBUG if failed else logging.WARNING, "the watchdog failed: %s: %s", type(error).__name__, error)
                failed = True

    def _check(self) -> None:
        now = time.monotonic()
        silence = now - self._last_beat
        waits = snapshot_waits(self._limits.by_kind(), loop=self._loop)
        blocked = silence > max(self._interval, 2 * self._beat_interval)
        if blocked:
            self._unreliable_until = now + 2 * self._interval
        settling = not blocked and now < self._unreliable_until
        loop_silent = silence if blocked else None
        stalls = [] if settling else find_stalls(waits, self._limits, loop_thread=self._loop_thread, loop_blocked=loop_silent)
        if now >= self._unreliable_until:
            for kind in self._backoff.keys() - {stall.kind for stall in stalls}:  # resolved
                del self._backoff[kind]
        for stall in stalls:
            if self._backoff.setdefault(stall.kind, Backoff()).due(now, stall.limit):
                self._report(stall, waits, blocked=blocked)
        troubles = tuple(format_report(stall, waits, self.status_tracker.step + 1) for stall in stalls)
        self._write("running", waits, silent=silence if blocked else 0.0, troubles=troubles)
        self._stop_if_stuck(stalls, waits, blocked=blocked)

    def _report(self, stall: Stall, waits: Sequence[Wait], *, blocked: bool) -> None:
        text = format_report(stall, waits, self.status_tracker.step + 1)
        self._reports.append(LogEntry(time.time(), text))
        if self._stacks is None:
            self._stacks = self._dump_stacks(text)
        if self._stacks is not None:
            text += f"\n  stacks at the first report: {self._stacks}"
        log.warning("watchdog: %s", text)
        if not blocked:
            self._call_in_loop(lambda: self._note(f"watchdog: {text}"))

    def _call_in_loop(self, call: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(call)

    def _dump_stacks(self, text: str) -> Path | None:
        """Write the stacks of all threads and asyncio tasks to a file in the log folder. Returns its path, or None on failure."""
        path = self._folder / time.strftime("stacks_%Y%m%d_%H%M%S.txt")
        try:
            dump_stacks(path, text, self._loop)
        except OSError as error:
            log.warning("could not write the stacks to %s: %s", path, error)
            return None
        return path

    def _stop_if_stuck(self, stalls: Sequence[Stall], waits: Sequence[Wait], *, blocked: bool) -> None:
        if time.monotonic() > self._give_up_at:
            self._exit_now()
        if self._stop_after is None or self._timeout is not None:
            return
        worst = max(stalls, key=lambda stall: stall.seconds, default=None)
        if worst is None or worst.seconds <= self._stop_after:
            return
        self._timeout = WatchdogTimeout(
            f"the run was ended after waiting longer than watchdog.stop_after_seconds = {self._stop_after:g}: "
            f"{format_report(worst, waits, self.status_tracker.step + 1)}"
        )
        if blocked or self._task is None:
            self._exit_now()
        self._give_up_at = time.monotonic() + SHUTDOWN_SECONDS
        task = self._task
        self._call_in_loop(lambda: task.cancel() if task is not None else None)

    def _exit_now(self) -> None:
        """Exit the process immediately, since the event loop is blocked or the run does not end.

        Checkpoints and metrics are always complete on disk.
        """
        self._write("failed", snapshot_waits(self._limits.by_kind()), error=f"{type(self._timeout).__name__}: {self._timeout}")
        log.critical("%s", self._timeout)
        exit_process(1)

    def _write(
        self,
        state: StatusState,
        waits: Sequence[Wait],
        *,
        silent: float = 0.0,
        troubles: tuple[str, ...] = (),
        error: str | None = None,
        traceback: str | None = None,
    ) -> None:
        write_status(
            self._folder,
            Status(
                state=state,
                pid=os.getpid(),
                host=socket.gethostname(),
                process_started=process_start_time(os.getpid()),
                started=self._started,
                written=time.time(),
                interval=self._interval,
                step=self.status_tracker.step,
                stepped=self.status_tracker.step_time,
                doing=self.status_tracker.activity,
                loop_silent=silent,
                waits=select_longest_waits(waits, MAX_WAITS_STORED),
                versions=_versions(),
                command=describe_command(),
                checkpoints=self._checkpoints,
                troubles=troubles,
                error=error,
                traceback=traceback,
                notes=tuple(self.status_tracker.notes),
                reports=tuple(self._reports),
                stacks=None if self._stacks is None else str(self._stacks),
            ),
        )


def schedule_exit(error: WatchdogTimeout) -> None:
    """Exit the process after SHUTDOWN_SECONDS, even if a stuck thread keeps it alive."""

    def exit_now() -> None:
        log.critical("%s", error)
        exit_process(1)

    timer = threading.Timer(SHUTDOWN_SECONDS, exit_now)
    timer.daemon = True
    timer.start()


def _versions() -> dict[str, str]:
    """Return the versions of Python and of installed packages."""
    if not _VERSIONS:
        _VERSIONS["python"] = platform.python_version()
        for name in ("strop", "torch", "transformers", "vllm"):
            with suppress(importlib.metadata.PackageNotFoundError):
                _VERSIONS[name] = importlib.metadata.version(name)
    return dict(_VERSIONS)


_VERSIONS: dict[str, str] = {}


# A tracker that keeps the latest messages of a run for ``status.json``.


MAX_ENTRIES = 20


class StatusTracker(NullTracker):
    """Keeps the latest step, activity and notes."""

    def __init__(self) -> None:
        self.step = -1
        self.step_time: float | None = None
        self.activity = "starting"
        self.notes: deque[LogEntry] = deque(maxlen=MAX_ENTRIES)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step, self.step_time = step, time.time()

    def note(self, text: str) -> None:
        self.notes.append(LogEntry(time.time(), text))

    def progress(self, text: str) -> None:
        self.activity = text

    def resume(self, step: int) -> None:
        self.step = max(step, 0)


# Dump the stacks of all threads and asyncio tasks of this process.


MAX_TASKS = 200


def dump_stacks(path: Path, header: str, loop: asyncio.AbstractEventLoop) -> None:
    """Write the stacks to a file. May be called from any thread. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        file.write(f"{header}\n\nThreads, the innermost call first\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        file.write("\nTasks of the event loop, the innermost call last\n")
        with suppress(RuntimeError):  # the set of tasks may change during iteration
            for task in list(asyncio.all_tasks(loop))[:MAX_TASKS]:
                file.write(f"\n{task.get_name()}\n" + "".join(f"  {line}\n" for line in _await_chain(task.get_coro())))


def _await_chain(coroutine: Any) -> Iterator[str]:
    """Yield a suspended coroutine, what it awaits, and so on. (``Task.print_stack`` shows only the outermost one.)"""
    while coroutine is not None:
        frame = next((value for name in ("cr_frame", "gi_frame", "ag_frame") if (value := getattr(coroutine, name, None))), None)
        if frame is None:
            yield repr(coroutine)
            return
        yield f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        awaited = (value for name in ("cr_await", "gi_yieldfrom", "ag_await") if (value := getattr(coroutine, name, None)))
        stepped = frame.f_locals.get("work")  # a generator that drives a coroutine itself (strop.environments.forks)
        coroutine = stepped if inspect.iscoroutine(stepped) else next(awaited, None)
