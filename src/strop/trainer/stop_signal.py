"""Stop a run on SIGTERM, which clusters send before they reclaim a machine, or at a time limit.

The first SIGTERM asks the loop, through a ``StopRequest``, to save and stop after the step in progress. A second one, or a step that takes
longer than the grace period, exits at once: the previous checkpoint is complete (law 6).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from strop.checkpointing.checkpointing_config import CheckpointingConfig
from strop.safety.exits import exit_process
from strop.stopping import STOPPED_EXIT_CODE, StopRequest

_import_time = time.monotonic()


@contextmanager
def handle_stop_signals(saving: CheckpointingConfig) -> Iterator[SignalHandler]:
    """Handle SIGTERM inside the context. If the run saves no checkpoints, leave the default handler: there is nothing to wait for."""
    limit = saving.save_deadline_seconds
    stop_request = StopRequest(deadline=None if limit is None else time.monotonic() + limit - process_age())
    enabled = saving.saving_enabled and saving.save_on_sigterm_within != 0
    handler = SignalHandler(
        stop_request, saving.save_on_sigterm_within, enabled=enabled and threading.current_thread() is threading.main_thread()
    )
    previous = signal.getsignal(signal.SIGTERM)
    handler.install()
    try:
        yield handler
    finally:
        handler.restore(previous)


class SignalHandler:
    """The handler of SIGTERM. It may interrupt any code, so it takes no lock and writes to the terminal directly."""

    def __init__(self, stop_request: StopRequest, within: float | None, *, enabled: bool) -> None:
        self.stop_request = stop_request
        self._within, self._enabled = within, enabled
        self._process = os.getpid()
        self._signalled = False
        self._timer: threading.Timer | None = None

    def install(self) -> None:
        """Install the handler. Call it again after something else has replaced it (``ray.init`` does)."""
        if self._enabled:
            signal.signal(signal.SIGTERM, self._on_signal)

    def restore(self, previous: Any) -> None:
        """Restore the previous handler and cancel the timer."""
        if self._enabled:
            signal.signal(signal.SIGTERM, previous)
        if self._timer is not None:
            self._timer.cancel()

    def _on_signal(self, *_: object) -> None:
        if os.getpid() != self._process:  # a forked child, which has no step to finish
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if self._signalled:
            _exit_now("A second SIGTERM")
        self._signalled = True
        self.stop_request.reason = self.stop_request.reason or "SIGTERM"
        within = "" if self._within is None else f", which may take {self._within:g} s (checkpointing.save_on_sigterm_within)"
        _write_stderr(f"SIGTERM: the run saves and stops after the step in progress{within}. Send SIGTERM again to exit at once.")
        if self._within is not None:
            self._timer = threading.Timer(
                self._within, _exit_now, (f"The step took longer than {self._within:g} s after SIGTERM",)
            )
            self._timer.daemon = True
            self._timer.start()


def _exit_now(why: str) -> None:
    _write_stderr(f"{why}: the run ends here. Start the same command again to continue from the newest checkpoint.")
    exit_process(STOPPED_EXIT_CODE)


def _write_stderr(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


def process_age() -> float:
    """Return the seconds since this process started; on systems without /proc, since this module was imported."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic() - _import_time
