"""When a run is told to end: SIGTERM, as clusters send it before they take a machine away, or its own limit of time.

The first SIGTERM asks the loop, through a ``Stopper``, to end after the step in progress, which is then saved. The second one, or a step
that takes longer than the time there is, ends the process where it stands: the checkpoint before is whole (law 6).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from strop.config.checkpointing import CheckpointingConfig
from strop.stopping import ENDED_EARLY, Stopper

_imported = time.monotonic()


@contextmanager
def told_to_end(saving: CheckpointingConfig) -> Iterator[Notice]:
    """While it lasts, SIGTERM is heeded. Where nothing is saved there is nothing to wait for: it ends the run as it ends any program."""
    limit = saving.must_save_after
    stopper = Stopper(deadline=None if limit is None else time.monotonic() + limit - process_age())
    waits = saving.saves and saving.save_on_sigterm_within != 0
    notice = Notice(stopper, saving.save_on_sigterm_within, waits=waits and threading.current_thread() is threading.main_thread())
    before = signal.getsignal(signal.SIGTERM)
    notice.heed()
    try:
        yield notice
    finally:
        notice.over(before)


class Notice:
    """What SIGTERM comes to. The handler runs between two instructions of whatever runs, so it takes no lock: it writes to the terminal as
    it is."""

    def __init__(self, stopper: Stopper, within: float | None, *, waits: bool) -> None:
        self.stopper = stopper
        self._within, self._waits = within, waits
        self._process = os.getpid()
        self._told = False
        self._timer: threading.Timer | None = None

    def heed(self) -> None:
        """From now on; again, where something else took the handler's place since (``ray.init`` does)."""
        if self._waits:
            signal.signal(signal.SIGTERM, self._come)

    def over(self, before: Any) -> None:
        if self._waits:
            signal.signal(signal.SIGTERM, before)
        if self._timer is not None:
            self._timer.cancel()

    def _come(self, *_: object) -> None:
        if os.getpid() != self._process:  # a fork, which has no step to finish
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if self._told:
            _end("A second SIGTERM")
        self._told = True
        self.stopper.reason = self.stopper.reason or "SIGTERM"
        within = "" if self._within is None else f", which may take {self._within:g} s (checkpointing.save_on_sigterm_within)"
        _say(f"SIGTERM: the run ends, and is saved, after the step in progress{within}. Another one ends it at once.")
        if self._within is not None:
            self._timer = threading.Timer(self._within, _end, (f"The step took longer than {self._within:g} s after SIGTERM",))
            self._timer.daemon = True
            self._timer.start()


def _end(why: str) -> None:
    _say(f"{why}: the run ends here. The same command continues from the newest checkpoint.")
    os._exit(ENDED_EARLY)


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


def process_age() -> float:
    """Seconds since this process was started; where the system does not say, since this was imported."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic() - _imported
