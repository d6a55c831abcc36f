"""The live console: a panel redrawn in place below the scrolling notes.

    ╭─ strop · addition ─────────────────────────────────────────────────────────╮
    │ step 12/60  ━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  20%  4:10 left  │
    │                                                                            │
    │ reward     0.531  ▁▂▃▅▆▇▇▇           loss      0.0123  ▇▅▃▂▂▁▁▁            │
    │ ...                                                                        │
    │                                                                            │
    │ step time  4.2 s  ████████████████████▒▒▒▒▒▒▒▒▒▒▒░░                        │
    │                   █ generation 61%  █ training 33%  █ log-probs 6%         │
    │                                                                            │
    │ generating 12/32 groups  0:03                                              │
    ╰────────────────────────────────────────────────────────────────────────────╯

A thread redraws the panel while the event loop updates it, so shared objects are replaced and never mutated.
"""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Callable, Iterable, Mapping

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from strop.monitoring.console.columns import COLUMNS, Column, Phase, format_duration, format_seconds, phase_times
from strop.monitoring.console.progress import Progress
from strop.monitoring.trackers.base import NullTracker

MAX_WIDTH = 110  # for readability
MARGIN = 3  # space for the ^C that a terminal echoes: in a full line it would wrap and break the drawing
TILE_WIDTH = 32  # label 10, value 8, gap 2, curve 12
TILE_GAP = 4  # between tiles
SPARK_CHARS = "▁▂▃▄▅▆▇█"
SPARK_LENGTH = 12
REDRAWS_PER_SECOND = 4
# One colour per phase, in order. They differ in lightness, for colour-blind users.
PHASE_COLOURS = ("cyan", "bright_yellow", "blue", "magenta", "green", "bright_red", "white")


class Dashboard:
    """The content of the panel, which renders at any width."""

    def __init__(self, progress: Progress, title: str, clock: Callable[[], float]) -> None:
        self.progress = progress
        self.activity = ("starting", clock())
        self.closed = False
        self._title = title
        self._clock = clock
        self._history: Mapping[str, tuple[float, ...]] = {}
        self._phases: tuple[Phase, ...] = ()
        self._last_steps: Mapping[str, int] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        seen = {column.tag: float(metrics[column.tag]) for column in COLUMNS if column.tag in metrics}
        longer = {tag: (*self._history.get(tag, ()), value)[-SPARK_LENGTH:] for tag, value in seen.items()}
        self._last_steps = {**self._last_steps, **dict.fromkeys(seen, step)}
        self._history = {**self._history, **longer}
        self._phases = phase_times(metrics) or self._phases
        self.progress.log(step, metrics)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width - MARGIN, MAX_WIDTH)
        if width < 48 or console.height < 10:
            yield Group(self._render_progress(width), self._render_activity())
            return
        inner = width - 4
        letters = console.no_color or console.color_system is None  # without colours, letters mark the phases
        blocks: list[RenderableType] = [self._render_progress(inner)]
        if self._history:
            blocks += ["", self._render_tiles(inner)]
        if self._phases:
            blocks += ["", self._render_step_time(inner, letters)]
        blocks += ["", self._render_activity()]
        name = f"strop · {self._title}" if self._title else "strop"
        yield Panel(Group(*blocks), title=Text(name, "bold"), title_align="left", border_style="dim", width=width)

    def _render_progress(self, width: int) -> RenderableType:
        progress, row = self.progress, Table.grid(padding=(0, 2), expand=True)
        steps = f"{progress.step}" if progress.max_steps is None else f"{progress.step}/{progress.max_steps}"
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        eta = "" if not math.isfinite(progress.eta_seconds) or self.closed else f"{format_duration(progress.eta_seconds)} left"
        if progress.max_steps is None:
            row.add_row(Text(f"step {steps}", "bold"), "", Text(format_duration(progress.elapsed), "dim"))
            return row
        fraction = progress.step / progress.max_steps if progress.max_steps else 1.0
        bar = ProgressBar(
            total=max(progress.max_steps, 1), completed=progress.step, complete_style="cyan", finished_style="green"
        )
        ending = Text.assemble(f"{fraction:.0%}", (f"  {eta}" if eta else "", "dim")) if width >= 36 else Text(eta, "dim")
        row.add_row(Text(f"step {steps}", "bold"), bar, ending)
        return row

    def _render_tiles(self, width: int) -> Text:
        tiles = [self._render_tile(column) for column in COLUMNS if column.tag in self._history]
        num_columns = max(1, min(3, (width + TILE_GAP) // (TILE_WIDTH + TILE_GAP)))
        num_rows = -(-len(tiles) // num_columns)
        lines = [Text(" " * TILE_GAP).join(tiles[line::num_rows]) for line in range(num_rows)]  # column by column
        return Text("\n").join(lines)

    def _render_tile(self, column: Column) -> Text:
        """Render label, value and curve; ``@5`` marks a value of step 5 when later steps do not have the metric."""
        values, when = self._history[column.tag], self._last_steps[column.tag]
        curve = Text(sparkline(values), "cyan")
        if when < self.progress.step:
            curve.append(f" @{when}", "dim")
        tile = Text(no_wrap=True)
        tile.append(f"{column.label:<10}", "dim")
        tile.append(f"{column.format(values[-1]):>8}", "bold" if math.isfinite(values[-1]) else "bold red")
        tile.append("  ").append(curve)
        tile.truncate(TILE_WIDTH, pad=True)
        return tile

    def _render_step_time(self, width: int, letters: bool) -> RenderableType:
        total = sum(phase.seconds for phase in self._phases)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True)
        lead = Text.assemble(("step time ", "dim"), (f"{format_seconds(total):>8}", "bold"))
        right = width - 20
        grid.add_row(lead, _render_phase_bar(self._phases, min(right, 60), letters))
        grid.add_row("", _render_legend(self._phases, total, letters, right))
        return grid

    def _render_activity(self) -> Text:
        what, since = self.activity
        if self.closed:
            return Text(what, "bold")
        text = Text.assemble((what, "italic"), (f"  {format_duration(self._clock() - since)}", "dim"))
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


class LiveConsole(NullTracker):
    """Shows the panel. Notes and all other output scroll above it."""

    def __init__(
        self,
        max_steps: int | None,
        *,
        title: str = "",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._clock = clock
        self._dashboard = Dashboard(Progress(max_steps, clock), title, clock)
        self._live: Live | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._dashboard.log(step, metrics)
        self._draw()

    def note(self, text: str) -> None:
        stamp = Text(time.strftime("%H:%M:%S  "), "dim")
        for line in text.splitlines():
            self._console.print(Text.assemble(stamp, line), soft_wrap=True)

    def progress(self, text: str) -> None:
        what, _ = self._dashboard.activity
        if _activity_kind(what) != _activity_kind(text):
            self._dashboard.activity = (text, self._clock())
        else:
            self._dashboard.activity = (text, self._dashboard.activity[1])
        self._draw()

    def resume(self, step: int) -> None:
        self._dashboard.progress.resume(step)

    def close(self) -> None:
        """Leave the last drawing on the screen and restore the cursor."""
        if self._live is None:
            return
        progress = self._dashboard.progress
        done = progress.max_steps is not None and progress.step >= progress.max_steps
        outcome = "finished" if done else f"stopped at step {progress.step}"
        self._dashboard.closed = True
        self._dashboard.activity = (f"{outcome} after {format_duration(progress.elapsed)}", self._clock())
        live, self._live = self._live, None
        live.stop()
        atexit.unregister(self.close)

    def _draw(self) -> None:
        """Start drawing on the first update; earlier output stays ordinary output."""
        if self._live is not None or self._dashboard.closed:
            return
        self._live = Live(self._dashboard, console=self._console, refresh_per_second=REDRAWS_PER_SECOND)
        atexit.register(self.close)  # restores the cursor on an exit without close
        self._live.start(refresh=True)


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


def _activity_kind(progress: str) -> str:
    """Return the first word: `generating 3/32 groups` and `generating 4/32 groups` are one activity with one timer."""
    return progress.split(" ", 1)[0]


def _render_phase_bar(phases: tuple[Phase, ...], width: int, letters: bool) -> Text:
    """Render a bar of ``width`` cells. Rounds edges instead of lengths, so that the cells add up."""
    total, bar, edge, start = sum(phase.seconds for phase in phases), Text(no_wrap=True), 0.0, 0
    for index, phase in enumerate(phases):
        edge += phase.seconds / total * width
        bar.append((phase.name[0] if letters else "█") * (round(edge) - start), PHASE_COLOURS[index % len(PHASE_COLOURS)])
        start = round(edge)
    return bar


def _render_legend(phases: tuple[Phase, ...], total: float, letters: bool, width: int) -> Text:
    """Render the legend. Breaks lines between entries, since Rich would also break inside one."""
    lines = [Text()]
    for index, phase in enumerate(phases):
        if phase.seconds < 0.005 * total:
            continue
        entry = Text.assemble(
            (phase.name[0] if letters else "■", PHASE_COLOURS[index % len(PHASE_COLOURS)]),
            f" {phase.name} {phase.seconds / total:.0%}  ",
        )
        if lines[-1] and len(lines[-1]) + len(entry) - 2 > width:
            lines.append(Text())
        lines[-1].append_text(entry)
    return Text("\n").join(lines)
