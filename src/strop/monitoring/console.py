"""The console: a live panel on a terminal, one plain line per step in a log file."""

from __future__ import annotations

import io
import logging
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from strop import plugins
from strop.monitoring.console_columns import (
    COLUMNS,
    Column,
    Progress,
    StepTable,
    format_duration,
    phase_times,
)
from strop.monitoring.message_style import discard_output
from strop.monitoring.trackers.base import NullTracker, Tracker
from strop.safety.printable import make_printable

logger = logging.getLogger(__name__)

ConsoleKind = Literal["auto", "live", "plain", "none"]
LIVE = "live_console"  # in ``strop.functions``

# Seconds without output after which a plain console prints the current activity: during start and validation, and later.
SHORT_HEARTBEAT, HEARTBEAT = 10.0, 60.0
SMALLEST_SHARE = 0.05  # share of a step's time from which a phase is listed


def open_console(
    kind: ConsoleKind = "auto", *, max_steps: int | None = None, title: str = "", columns: Sequence[Column] = COLUMNS
) -> Tracker:
    """Create a console.

    ``auto`` is live on a UTF-8 terminal that supports cursor movement, and plain otherwise. Raises UserCodeError if no extension
    draws the live one.
    """
    if kind == "none":
        return NullTracker()
    if kind == "plain" or (kind == "auto" and not (_supports_live(sys.stdout) and plugins.find_path("functions", LIVE))):
        return PlainConsole(max_steps, columns=columns)
    if kind not in ("auto", "live"):
        raise ValueError(f"there is no console {kind!r}; set one of auto, live, plain, none")
    console: Tracker = plugins.load("functions", LIVE)(max_steps, title=title, columns=columns)
    return console


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


UNITS = ("B", "KB", "MB", "GB", "TB")


@dataclass(frozen=True, kw_only=True)
class Closing:
    """The content of the last lines."""

    log_dir: Path
    samples: bool  # whether the policy samples what it trains on
    stores_rollouts: bool
    trains_scores: bool  # whether it trains a reward model
    checkpoint: Path | None  # the newest complete one
    seconds: float  # of this start
    tokens: float  # trained on since the beginning of the run
    warnings: Sequence[str] = ()
    failed_trackers: Sequence[str] = ()
    hints: Sequence[str] = ()  # of the trackers

    def __str__(self) -> str:
        took = f"{format_duration(self.seconds)}, {self.tokens:,.0f} tokens trained on"
        lines = [f"took        {took}"]
        if self.checkpoint is not None:
            lines.append(f"checkpoint  {self.checkpoint} ({format_size(folder_size(self.checkpoint))})")
        lines += [*map(_shorten_warning, self.warnings), *(f"warning: {failed}" for failed in self.failed_trackers), *self.hints]
        return "\n".join([*lines, "next:", *(f"    {command}" for command in self.commands())])

    def commands(self) -> list[str]:
        """Return the commands that work for this kind of run."""
        logs = shlex.quote(str(self.log_dir))
        found = [f"strop plot {logs}", f"strop report {logs}"]
        if self.stores_rollouts:
            found.append(f"strop rollouts {logs} --worst 3")
        if self.checkpoint is not None:
            model = shlex.quote(str(self.checkpoint))
            found += [f"strop eval {model}"] if self.samples else []
            found.append(f"strop export {model} OUT")
            found += [f"strop serve {model}"] if not self.trains_scores else []
        return found


def _shorten_warning(text: str) -> str:
    """Return the first sentence of a warning, which was already printed in full, and where to read more."""
    sentence, _, rest = text.partition(". ")
    read_on = re.search(r" \(docs/\S+\)$", rest)
    return sentence + (read_on[0] if read_on else "")


def folder_size(folder: Path) -> int:
    """Return the bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def format_size(size: float) -> str:
    """Format a number of bytes: 812 B, 1.6 GB."""
    power = 0
    while size >= 1000 and power < len(UNITS) - 1:
        size, power = size / 1000, power + 1
    return f"{size:.0f} {UNITS[power]}" if power < 2 or size >= 100 else f"{size:.1f} {UNITS[power]}"
