"""The console: a live panel on a terminal, one plain line per step in a log file."""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TextIO

from strop.monitoring.console.columns import COLUMNS, COLUMNS_BY_SECTION, Column, format_duration, phase_times
from strop.monitoring.console.message_style import discard_output
from strop.monitoring.console.progress import Progress
from strop.monitoring.console.step_table import StepTable
from strop.monitoring.trackers.base import NullTracker, Tracker
from strop.safety.printable import make_printable

logger = logging.getLogger(__name__)

ConsoleKind = Literal["auto", "live", "plain", "none"]

# Seconds without output after which a plain console prints the current activity: during start and validation, and later.
SHORT_HEARTBEAT, HEARTBEAT = 10.0, 60.0
SMALLEST_SHARE = 0.05  # share of a step's time from which a phase is listed


def open_console(kind: ConsoleKind = "auto", *, max_steps: int | None = None, title: str = "", section: str = "") -> Tracker:
    """Create a console, with the columns of the runs of ``section``.

    ``auto`` is live on a UTF-8 terminal that supports cursor movement, and plain otherwise.
    """
    columns = COLUMNS_BY_SECTION.get(section, COLUMNS)
    if kind == "none":
        return NullTracker()
    if kind == "plain" or (kind == "auto" and not _supports_live(sys.stdout)):
        return PlainConsole(max_steps, columns=columns)
    if kind not in ("auto", "live"):
        raise ValueError(f"there is no console {kind!r}; set one of auto, live, plain, none")
    from strop.monitoring.console.live import LiveConsole

    return LiveConsole(max_steps, title=title, columns=columns)


def _supports_live(out: TextIO) -> bool:
    moves = out.isatty() and os.environ.get("TERM", "dumb").lower() not in ("dumb", "unknown")
    return moves and (out.encoding or "").lower().replace("-", "") == "utf8"  # the panel uses non-ASCII characters


class PlainConsole(NullTracker):
    """Prints one flushed row per step below a header. Also prints the current activity: at once during the start, later only in
    long steps.
    """

    def __init__(
        self,
        max_steps: int | None,
        *,
        columns: Sequence[Column] = COLUMNS,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out or sys.stdout
        self._clock = clock
        self._progress = Progress(max_steps, clock)
        self._table = StepTable(columns, max_steps)
        self._starting = True  # no step has been logged yet
        self._activity = ""
        self._last_output = clock()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._progress.is_known(step):
            return self._table.see(metrics)
        self._starting = False
        self._progress.log(step, metrics)
        *header, row = self._table.format_rows(step, metrics)
        for line in (*header, "  ".join(part for part in (row, self._format_phases(metrics), self._format_eta()) if part)):
            self._print(line)

    def note(self, text: str) -> None:
        for line in make_printable(text).splitlines():
            self._print(line)

    def progress(self, text: str) -> None:
        activity = text.partition(":")[0]
        begins, self._activity = activity != self._activity, activity
        short = self._starting or activity == "validating"
        if (begins and self._starting) or self._clock() - self._last_output >= (SHORT_HEARTBEAT if short else HEARTBEAT):
            self._print(f"... {text}")

    def resume(self, step: int) -> None:
        self._progress.resume(step)

    def _format_phases(self, metrics: Mapping[str, float]) -> str:
        phases = phase_times(metrics)
        total = sum(phase.seconds for phase in phases)
        shown = ", ".join(
            f"{phase.name} {phase.seconds / total:.0%}" for phase in phases if phase.seconds >= SMALLEST_SHARE * total
        )
        return f"({shown})" if shown else ""

    def _format_eta(self) -> str:
        eta = self._progress.eta_seconds
        return f"{format_duration(eta)} left" if math.isfinite(eta) and eta > 0 else ""

    def _print(self, line: str) -> None:
        stamped = f"{time.strftime('%m-%d %H:%M:%S')}  {line}"
        encoding = self._out.encoding or "utf-8"
        try:
            self._out.write(stamped.encode(encoding, "replace").decode(encoding) + "\n")  # an ASCII log must not raise
            self._out.flush()
        except BrokenPipeError:
            self._out = io.StringIO()
            discard_output()
            logger.warning("the reader of the output is gone; the run goes on, and its metrics are still recorded")
        self._last_output = self._clock()
