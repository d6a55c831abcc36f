"""The console: a live panel on a terminal, one plain line per step in a log file."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Literal, TextIO

from strop.monitoring.console.columns import COLUMNS, format_duration, format_seconds, phase_times
from strop.monitoring.console.progress import Progress
from strop.monitoring.trackers.base import NullTracker, Tracker
from strop.printable import make_printable

ConsoleKind = Literal["auto", "live", "plain", "none"]

HEARTBEAT_SECONDS = 60.0  # seconds without output after which a plain console prints the current activity


def open_console(kind: ConsoleKind = "auto", *, max_steps: int | None = None, title: str = "") -> Tracker:
    """Create a console. ``auto`` is live on a UTF-8 terminal that supports cursor movement, and plain otherwise."""
    if kind == "none":
        return NullTracker()
    if kind == "plain" or (kind == "auto" and not _supports_live(sys.stdout)):
        return PlainConsole(max_steps)
    if kind not in ("auto", "live"):
        raise ValueError(f"there is no console {kind!r}; set one of auto, live, plain, none")
    from strop.monitoring.console.live import LiveConsole

    return LiveConsole(max_steps, title=title)


def _supports_live(out: TextIO) -> bool:
    moves = out.isatty() and os.environ.get("TERM", "dumb").lower() not in ("dumb", "unknown")
    return moves and (out.encoding or "").lower().replace("-", "") == "utf8"  # the panel uses non-ASCII characters


class PlainConsole(NullTracker):
    """Prints one flushed line per step, in aligned columns, and the current activity if a step takes longer than a minute."""

    def __init__(self, max_steps: int | None, *, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out or sys.stdout
        self._clock = clock
        self._progress = Progress(max_steps, clock)
        self._seen_tags: frozenset[str] = frozenset()
        self._last_output = clock()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.log(step, metrics)
        self._seen_tags |= metrics.keys()
        parts = [self._format_step(step), *self._format_columns(metrics), self._format_times(metrics), self._format_eta()]
        self._print("  ".join(part for part in parts if part))

    def note(self, text: str) -> None:
        for line in make_printable(text).splitlines():
            self._print(line)

    def progress(self, text: str) -> None:
        if self._clock() - self._last_output >= HEARTBEAT_SECONDS:
            self._print(f"... {text}")

    def resume(self, step: int) -> None:
        self._progress.resume(step)

    def _format_step(self, step: int) -> str:
        steps = self._progress.max_steps
        return f"step {step}" if steps is None else f"step {step:>{len(str(steps))}}/{steps}"

    def _format_columns(self, metrics: Mapping[str, float]) -> list[str]:
        """Format all columns seen so far, with `-` for metrics that this step does not have."""
        return [
            f"{column.label} {column.format(metrics[column.tag]) if column.tag in metrics else '-':>7}"
            for column in COLUMNS
            if column.tag in self._seen_tags
        ]

    def _format_times(self, metrics: Mapping[str, float]) -> str:
        phases = phase_times(metrics)
        total = sum(phase.seconds for phase in phases)
        if not phases:
            return ""
        fractions = ", ".join(f"{phase.name} {phase.seconds / total:.0%}" for phase in phases if phase.seconds >= 0.005 * total)
        return f"{format_seconds(total)} ({fractions})"

    def _format_eta(self) -> str:
        eta = self._progress.eta_seconds
        return f"{format_duration(eta)} left" if math.isfinite(eta) and eta > 0 else ""

    def _print(self, line: str) -> None:
        stamped = f"{time.strftime('%m-%d %H:%M:%S')}  {line}"
        encoding = self._out.encoding or "utf-8"
        self._out.write(stamped.encode(encoding, "replace").decode(encoding) + "\n")  # an ASCII log must not raise
        self._out.flush()
        self._last_output = self._clock()
