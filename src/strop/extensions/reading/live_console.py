"""The live console: a panel redrawn in place below the scrolling notes and a line for each step.

    17:03:12  step 11/60    0.506      0.250    4.3 s
    ╭─ strop · addition ───────────────────────────────────────────────────────╮
    │ step 12/60  ━━━━━━━━━━╸                                   20%  4:10 left │
    │ generating 12/32 groups  0:03                                            │
    │                                                                          │
    │ reward      0.531  ▁▂▃▅▆▇▇▇         loss       0.0123  ▇▅▃▂▂▁▁▁          │
    │ ...                                                                      │
    │                                                                          │
    │ step time   4.2 s                   training      33%  ━━━━              │
    │ generation    61%  ━━━━━━━          log-probs      6%  ╸                 │
    ╰──────────────────────────────────────────────────────────────────────────╯

A thread redraws the panel while the event loop updates it, so shared objects are replaced and never mutated.
"""

from __future__ import annotations

import atexit
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from strop.monitoring.console_columns import (
    COLUMNS,
    Column,
    Phase,
    Progress,
    StepTable,
    choose_columns,
    format_duration,
    format_seconds,
    phase_times,
)
from strop.monitoring.trackers.base import NullTracker
from strop.safety.printable import make_printable

MAX_WIDTH = 110  # for readability
MARGIN = 3  # space for the ^C that a terminal echoes: in a full line it would wrap and break the drawing
CELL_WIDTH = 35  # of label, value and curve, with the gaps between them
SPARK_CHARS = "▁▂▃▄▅▆▇█"
SPARK_LENGTH = 12
REDRAWS_PER_SECOND = 4
STAMP = "%H:%M:%S  "  # same width as the formatted time
RECENT_LINES = 50

Cell = tuple[RenderableType, RenderableType, RenderableType]  # label, value, curve


class LiveConsole(NullTracker):
    """Shows the panel. Notes, a line for each step and all other output scroll above it."""

    def __init__(
        self,
        max_steps: int | None,
        *,
        title: str = "",
        columns: Sequence[Column] = COLUMNS,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._clock = clock
        self._title = title
        self._columns = columns
        self._table = StepTable(columns, max_steps)
        self._progress = Progress(max_steps, clock)
        self._activity = ("starting", clock())  # what, since when
        self._closed = False
        self._history: Mapping[str, tuple[float, ...]] = {}
        self._last_steps: Mapping[str, int] = {}  # latest step at which each metric was logged
        self._phases: tuple[Phase, ...] = ()
        self._recent: deque[Text] = deque(maxlen=RECENT_LINES)  # the latest lines above the panel
        self._live: Live | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._progress.is_known(step):
            return self._table.see(metrics)
        seen = {column.tag: float(metrics[column.tag]) for column in self._columns if column.tag in metrics}
        longer = {tag: (*self._history.get(tag, ()), value)[-SPARK_LENGTH:] for tag, value in seen.items()}
        self._last_steps = {**self._last_steps, **dict.fromkeys(seen, step)}
        self._history = {**self._history, **longer}
        self._phases = phase_times(metrics) or self._phases
        self._progress.log(step, metrics)
        for row in self._table.format_rows(step, metrics, width=self._console.width - MARGIN - len(STAMP)):
            self._print(row, cut=True)
        self._draw()

    def note(self, text: str) -> None:
        for line in make_printable(text).splitlines():
            self._print(line)

    def _print(self, line: str, *, cut: bool = False) -> None:
        printed = Text.assemble((time.strftime(STAMP), "dim"), line)
        self._recent.append(printed)
        self._console.print(printed, soft_wrap=not cut, no_wrap=cut, overflow="crop" if cut else None)

    def progress(self, text: str) -> None:
        what, since = self._activity
        same = (
            what.split(" ", 1)[0] == text.split(" ", 1)[0]
        )  # `generating 3/32 groups` and `4/32` are one activity with one timer
        self._activity = (text, since if same else self._clock())
        self._draw()

    def resume(self, step: int) -> None:
        self._progress.resume(step)

    def close(self) -> None:
        """Leave the last drawing on the screen and restore the cursor."""
        if self._live is None:
            return
        progress = self._progress
        done = progress.max_steps is not None and progress.step >= progress.max_steps
        outcome = "finished" if done else f"stopped at step {progress.step}"
        self._closed = True
        self._activity = (f"{outcome} after {format_duration(progress.elapsed)}", self._clock())
        live, self._live = self._live, None
        live.stop()
        atexit.unregister(self.close)

    def _draw(self) -> None:
        """Start drawing on the first update; earlier output remains ordinary output."""
        if self._live is not None or self._closed:
            return
        self._live = _ResizableLive(self._recent, get_renderable=self.render, console=self._console)
        atexit.register(self.close)  # restores the cursor on an exit without close
        self._live.start(refresh=True)

    def render(self) -> RenderableType:
        """Return the panel at the width of the terminal; in a small one, only the progress and the activity."""
        width = min(self._console.width - MARGIN, MAX_WIDTH)
        if width < 48 or self._console.height < 10:
            return Group(self._render_progress(short=width < 36), self._render_first_metrics(width), self._render_activity())
        blocks: list[RenderableType] = [self._render_progress(), self._render_activity()]
        for cells in (self._metric_cells(), self._phase_cells()):
            if cells:
                blocks += ["", _render_cells(cells, width - 4)]
        name = f"strop · {self._title}" if self._title else "strop"
        return Panel(Group(*blocks), title=Text(name, "bold"), title_align="left", border_style="dim", width=width)

    def _render_progress(self, *, short: bool = False) -> RenderableType:
        progress, row = self._progress, Table.grid(padding=(0, 2), expand=True)
        row.add_column(style="bold", no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        if progress.max_steps is None:
            row.add_row(f"step {progress.step}", "", Text(format_duration(progress.elapsed), "dim"))
            return row
        left = "" if self._closed or math.isnan(progress.eta_seconds) else f"{format_duration(progress.eta_seconds)} left"
        percent = f"{progress.step / progress.max_steps if progress.max_steps else 1:.0%}"
        bar = ProgressBar(max(progress.max_steps, 1), progress.step, complete_style="cyan", finished_style="green")
        ending = Text(left, "dim") if short else Text.assemble(percent, (f"  {left}" if left else "", "dim"))
        row.add_row(f"step {progress.step}/{progress.max_steps}", bar, ending)
        return row

    def _render_first_metrics(self, width: int) -> Text:
        """Return as many metrics as fit in one line, for a small terminal."""
        parts = [f"{column.label} {column.format(self._history[column.tag][-1])}" for column in self._shown_columns()]
        while len("  ".join(parts)) > width and len(parts) > 1:
            parts.pop()
        return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")

    def _shown_columns(self) -> list[Column]:
        return choose_columns(self._columns, frozenset(self._history))

    def _metric_cells(self) -> list[Cell]:
        return [self._metric_cell(column) for column in self._shown_columns()]

    def _metric_cell(self, column: Column) -> Cell:
        """Return label, value and curve; ``@5`` marks a value of step 5 when later steps do not have the metric."""
        values, when = self._history[column.tag], self._last_steps[column.tag]
        since = f" @{when}" if when < self._progress.step else ""
        curve = Text.assemble((sparkline(values)[-SPARK_LENGTH + len(since) :], "cyan"), (since, "dim"))
        return column.label, Text(column.format(values[-1]), "bold" if math.isfinite(values[-1]) else "bold red"), curve

    def _phase_cells(self) -> list[Cell]:
        """Return the time of a step, and the fraction of it that each phase takes."""
        total = sum(phase.seconds for phase in self._phases)
        shown = [phase for phase in self._phases if phase.seconds >= 0.005 * total]
        cells: list[Cell] = [("step time", Text(format_seconds(total), "bold"), "")] if shown else []
        for phase in shown:
            bar = ProgressBar(total, phase.seconds, width=SPARK_LENGTH, complete_style="cyan")
            cells.append((phase.name, f"{phase.seconds / total:.0%}", bar))
        return cells

    def _render_activity(self) -> Text:
        what, since = self._activity
        if self._closed:
            return Text(what, "bold")
        timer = format_duration(self._clock() - since)
        return Text.assemble((what, "italic"), (f"  {timer}", "dim"), no_wrap=True, overflow="ellipsis")


def _render_cells(cells: Sequence[Cell], width: int) -> Table:
    """Render cells in one to three columns, column by column."""
    num_columns = max(1, min(3, width // CELL_WIDTH))
    num_rows = -(-len(cells) // num_columns)
    table = Table.grid(padding=(0, 2))
    for _ in range(num_columns):
        table.add_column(style="dim", no_wrap=True, min_width=10, max_width=14)
        table.add_column(justify="right", no_wrap=True, min_width=8)
        table.add_column(no_wrap=True, width=SPARK_LENGTH)
    for line in range(num_rows):
        table.add_row(*(part for cell in cells[line::num_rows] for part in cell))
    return table


class _ResizableLive(Live):
    """Redraws on a clean screen after the terminal was resized, because the old drawing wraps unpredictably and cannot be erased."""

    def __init__(self, recent: deque[Text], *, console: Console, get_renderable: Callable[[], RenderableType]) -> None:
        super().__init__(get_renderable=get_renderable, console=console, refresh_per_second=REDRAWS_PER_SECOND)
        self._recent = recent
        self._size = console.size

    def refresh(self) -> None:
        with self._lock:
            size, self._size = self._size, self.console.size
            if size != self._size and self.is_started:
                self._live_render._shape = None  # nothing to erase
                rows = max(self._size.height - 12, 0)
                self.console.control(Control.clear(), Control.home())
                lines = list(self._recent)[-rows:] if rows else []
                self.console.print(*lines, sep="\n", soft_wrap=True, end="\n" if lines else "")
            super().refresh()


def sparkline(values: Iterable[float]) -> str:
    """Return a one-line curve, with a gap for values that are not finite."""
    values = tuple(values)
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, span = min(finite), max(finite) - min(finite)
    top = len(SPARK_CHARS) - 1
    return "".join(
        SPARK_CHARS[round((value - low) / span * top) if span > 0 else 0] if math.isfinite(value) else " " for value in values
    )
