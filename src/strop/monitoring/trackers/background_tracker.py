"""A tracker in its own thread, so that a slow, hanging or failing service does not affect the run."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from strop.monitoring.trackers.base import NullTracker, SavedCheckpoint, StepMedia, Tracker, describe_error
from strop.storage.files import is_out_of_space

logger = logging.getLogger(__name__)

CAPACITY = 1000  # calls that wait
THREAD = "tracker-"  # prefix of thread names
STUCK_SECONDS = 120.0  # time after which a warning is given about a call that has not returned


@dataclass(frozen=True)
class _Call:
    method: str
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.method}, step {self.arguments[0]}" if self.method in ("log", "log_media", "resume") else self.method


class BackgroundTracker(NullTracker):
    """Calls ``tracker`` from one thread, in order. Its own methods return at once and never raise.

    At most ``capacity`` calls wait; further ones are lost. ``close`` waits ``close_seconds``. Losses cause warnings and are
    listed in ``failures``. A tracker that raises is disabled from then on, except for a full disk. In a forked process calls do nothing.
    """

    def __init__(
        self,
        tracker: Tracker,
        *,
        capacity: int = CAPACITY,
        close_seconds: float = 60.0,
        stuck_seconds: float = STUCK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tracker = tracker
        self._name = type(tracker).__name__
        self._capacity, self._close_seconds, self._stuck_seconds, self._clock = capacity, close_seconds, stuck_seconds, clock
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[_Call] = deque()
        self._current: tuple[_Call, float] | None = None  # the running call, and its start
        self._off = self._closing = self._said_stuck = False
        self._lost = 0
        self._refused: set[str] = set()  # methods whose last call found the disk full
        self._refused_calls = 0
        self._failures: list[str] = []
        self._thread: threading.Thread | None = None

    @property
    def failures(self) -> list[str]:
        """What was not recorded: one message for each reason."""
        lost = [f"{self._name} was too slow: {self._lost} calls are not in it"] if self._lost else []
        found_full = self._refused_calls and f"{self._name} found the disk full: {self._refused_calls} calls are not in it"
        return [*self._failures, *([found_full] if found_full else []), *lost]

    def log(self, step: int, metrics: Any) -> None:
        self._enqueue("log", step, dict(metrics))

    def log_media(self, step: int, media: StepMedia) -> None:
        self._enqueue("log_media", step, media)

    def log_checkpoint(self, saved: SavedCheckpoint) -> None:
        self._enqueue("log_checkpoint", saved)

    def note(self, text: str) -> None:
        self._enqueue("note", text)

    def resume(self, step: int) -> None:
        self._enqueue("resume", step)

    def close(self) -> None:
        """Wait until all calls are made and the tracker is closed, at most ``close_seconds``."""
        if os.getpid() != self._process:
            return
        with self._changed:
            if self._closing:
                return
            self._closing = True
            if not self._off:
                self._waiting.append(_Call("close", ()))
                self._start()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(self._close_seconds)
            if self._thread.is_alive():
                self._give_up()

    def _enqueue(self, method: str, *arguments: Any) -> None:
        if os.getpid() != self._process:  # a fork lacks the thread, and its lock may be held forever
            return
        with self._changed:
            if self._off or self._closing:
                return
            if len(self._waiting) >= self._capacity:
                self._lose()
                return
            self._waiting.append(_Call(method, arguments))
            self._start()
            self._warn_if_stuck()
            self._changed.notify()

    def _start(self) -> None:
        if self._thread is None:
            _silence_retries()
            self._thread = threading.Thread(target=self._run, name=f"{THREAD}{self._name}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._off:
                    self._changed.wait()
                if self._off:
                    return
                call = self._waiting.popleft()
                self._current = call, self._clock()
            self._make(call)
            with self._changed:
                self._current = None
            if call.method == "close":
                return

    def _make(self, call: _Call) -> None:
        try:
            method = getattr(self._tracker, call.method, None)  # a user's tracker may lack newer methods
            if method is not None:
                method(*call.arguments)
        except BaseException as error:  # a package may exit, or panic in Rust, which would silently end only this thread
            if is_out_of_space(error):
                self._warn_of_full_disk(call.method, error)
            else:
                self._switch_off(error)
        else:
            self._refused.discard(call.method)

    def _warn_of_full_disk(self, method: str, error: BaseException) -> None:
        if not self._refused:
            logger.warning("%s could not write and is tried again at the next step: %s", self._name, describe_error(error))
        self._refused.add(method)
        self._refused_calls += 1

    def _switch_off(self, error: BaseException) -> None:
        with self._changed:
            self._off = True
            self._waiting.clear()
        what = describe_error(error)
        self._failures.append(f"{self._name} failed and was off for the rest of this run: {what}")
        logger.warning("%s failed and is off for the rest of this run: %s", self._name, what)
        logger.debug("traceback of %s", self._name, exc_info=error)

    def _lose(self) -> None:
        self._lost += 1
        if self._lost == 1:
            logger.warning(
                "%s is slower than the run: %d calls wait, and further calls are not recorded there (metrics.jsonl has all of it)",
                self._name,
                self._capacity,
            )

    def _warn_if_stuck(self) -> None:
        if self._current is None or self._said_stuck:
            return
        call, since = self._current
        if (seconds := self._clock() - since) > self._stuck_seconds:
            self._said_stuck = True
            logger.warning("%s has not returned for %.0f s (%s); the run goes on without waiting", self._name, seconds, call)

    def _give_up(self) -> None:
        with self._changed:
            steps = [call.arguments[0] for call in self._waiting if call.method == "log"]
            current = f" ({self._current[0]})" if self._current else ""
            self._off = True
            self._waiting.clear()
        lost = f"; the steps {steps[0]} to {steps[-1]} are not in it" if steps else ""
        message = f"{self._name} did not finish within {self._close_seconds:g} s at the end of the run{current}{lost}"
        self._failures.append(message)
        logger.warning("%s", message)


def _silence_retries() -> None:
    """Suppress urllib3's warnings for each retry of an unreachable service, which end in a single warning of Strop's."""
    urllib3 = logging.getLogger("urllib3.connectionpool")
    if _is_no_retry not in urllib3.filters:
        urllib3.addFilter(_is_no_retry)


def _is_no_retry(record: logging.LogRecord) -> bool:
    return not ((record.threadName or "").startswith(THREAD) and str(record.msg).startswith("Retrying"))
