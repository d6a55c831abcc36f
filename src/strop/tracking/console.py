"""The console: a live panel on a terminal, one plain line per step in a log file."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Literal, TextIO

from strop.tracking.base import Silent, Tracker
from strop.tracking.columns import COLUMNS, brief, duration, phases
from strop.tracking.pace import Pace

Kind = Literal["auto", "live", "plain", "none"]

HEARTBEAT = 60.0  # seconds without output after which a plain console prints the current activity


def open_console(kind: Kind = "auto", *, max_steps: int | None = None, title: str = "") -> Tracker:
    """Create a console. ``auto`` is live on a UTF-8 terminal that supports cursor movement, and plain otherwise."""
    if kind == "none":
        return Silent()
    if kind == "plain" or (kind == "auto" and not _can_redraw(sys.stdout)):
        return PlainConsole(max_steps)
    if kind not in ("auto", "live"):
        raise ValueError(f"there is no console {kind!r}; set one of auto, live, plain, none")
    from strop.tracking.live import LiveConsole

    return LiveConsole(max_steps, title=title)


def _can_redraw(out: TextIO) -> bool:
    moves = out.isatty() and os.environ.get("TERM", "dumb").lower() not in ("dumb", "unknown")
    return moves and (out.encoding or "").lower().replace("-", "") == "utf8"  # the panel uses non-ASCII characters


class PlainConsole(Silent):
    """Prints one flushed line per step, in aligned columns, and the current activity if a step takes longer than a minute."""

    def __init__(self, max_steps: int | None, *, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out or sys.stdout
        self._clock = clock
        self._pace = Pace(max_steps, clock)
        self._seen: frozenset[str] = frozenset()
        self._spoke = clock()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.log(step, metrics)
        self._seen |= metrics.keys()
        parts = [self._where(step), *self._columns(metrics), self._time(metrics), self._left()]
        self._say("  ".join(part for part in parts if part))

    def note(self, text: str) -> None:
        for line in text.splitlines():
            self._say(line)

    def progress(self, text: str) -> None:
        if self._clock() - self._spoke >= HEARTBEAT:
            self._say(f"... {text}")

    def resume(self, step: int) -> None:
        self._pace.resume(step)

    def _where(self, step: int) -> str:
        steps = self._pace.max_steps
        return f"step {step}" if steps is None else f"step {step:>{len(str(steps))}}/{steps}"

    def _columns(self, metrics: Mapping[str, float]) -> list[str]:
        """Format all columns seen so far, with `-` for metrics that this step does not have."""
        return [
            f"{column.label} {column.write(metrics[column.tag]) if column.tag in metrics else '-':>7}"
            for column in COLUMNS
            if column.tag in self._seen
        ]

    def _time(self, metrics: Mapping[str, float]) -> str:
        parts = phases(metrics)
        total = sum(part.seconds for part in parts)
        if not parts:
            return ""
        shares = ", ".join(f"{part.name} {part.seconds / total:.0%}" for part in parts if part.seconds >= 0.005 * total)
        return f"{brief(total)} ({shares})"

    def _left(self) -> str:
        left = self._pace.left
        return f"{duration(left)} left" if math.isfinite(left) and left > 0 else ""

    def _say(self, line: str) -> None:
        stamped = f"{time.strftime('%m-%d %H:%M:%S')}  {line}"
        encoding = self._out.encoding or "utf-8"
        self._out.write(stamped.encode(encoding, "replace").decode(encoding) + "\n")  # an ASCII log must not raise
        self._out.flush()
        self._spoke = self._clock()
