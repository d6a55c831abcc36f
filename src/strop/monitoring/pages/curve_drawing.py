"""Curves of a run as inline SVG: small multiples with the same rules as ``strop plot``.

A long series is thinned to the least and the largest value of each of equal stretches, so that no spike is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strop.monitoring.console.columns import format_number, format_seconds
from strop.monitoring.pages.markup import escape
from strop.monitoring.plot import Curve
from strop.monitoring.run_lines import SMOOTH_ABOVE, smooth

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360.0, 170.0, 46.0, 8.0, 8.0, 20.0
MAX_POINTS = 400  # of a line
MAX_BARS = 80  # longer runs average several steps per bar
COLOURS = 7  # of the page's style

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class _Frame:
    """Where values are in a picture: the ranges of both axes."""

    x: tuple[float, float]
    y: tuple[float, float]

    def left(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - self.x[0]) / ((self.x[1] - self.x[0]) or 1.0)

    def top(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.y[0]) / ((self.y[1] - self.y[0]) or 1.0)

    def path(self, points: Points) -> str:
        return "M" + "L".join(f"{self.left(x):.1f} {self.top(y):.1f}" for x, y in points)

    def draw_axes(self) -> str:
        rows = [
            f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{self.top(tick):.1f}" y2="{self.top(tick):.1f}"/>'
            f'<text x="{LEFT - 6:g}" y="{self.top(tick) + 4:.1f}" text-anchor="end">{format_tick(tick)}</text>'
            for tick in make_ticks(*self.y)
        ]
        columns = [
            f'<text x="{self.left(tick):.1f}" y="{HEIGHT - 5:g}" text-anchor="middle">{tick:g}</text>'
            for tick in make_ticks(*self.x, most=6)
            if tick == round(tick)
        ]
        return "".join((*rows, *columns))


def draw_curve(curve: Curve, points: Points, bands: Sequence[tuple[float, float, float]] = ()) -> str:
    """Return the figure of one metric.

    Args:
        curve: Its title and the rules of its axis.
        points: (step, value), of which there is at least one.
        bands: (step, low, high) of the values that have an interval.
    """
    values = [value for _, value in points]
    ends = [end for _, low, high in bands for end in (low, high)]
    reference = [] if curve.reference is None else [curve.reference]
    frame = _make_frame(
        points, find_range([*values, *ends, *reference], span=curve.span, share=curve.share, from_zero=curve.from_zero)
    )
    long = len(points) > SMOOTH_ABOVE
    line = [(x, y) for (x, _), y in zip(points, smooth(values), strict=True)] if long else list(points)
    drawn = [frame.draw_axes()]
    if curve.reference is not None:
        place = f"{frame.top(curve.reference):.1f}"
        drawn.append(f'<line class="reference" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{place}" y2="{place}"/>')
    drawn += [_draw_whisker(frame, each) for each in bands]
    if long:
        drawn.append(f'<path class="line raw s0" d="{frame.path(thin(points))}"/>')
    drawn.append(f'<path class="line s0" d="{frame.path(thin(line))}"/>')
    if not long:
        drawn += [f'<circle class="f0" r="3" cx="{frame.left(x):.1f}" cy="{frame.top(y):.1f}"/>' for x, y in points]
    said = (
        f"{curve.title}: {format_number(values[0])} at step {points[0][0]:g}, {format_number(values[-1])} at step {points[-1][0]:g}, "
        f"from {format_number(min(values))} to {format_number(max(values))}"
    )
    return _make_figure(curve.title, said, format_number(values[-1]), drawn, frame, thin(points))


def draw_phases(rows: Sequence[tuple[float, Mapping[str, float]]], title: str = "Seconds per step") -> str:
    """Return stacked bars: (step, seconds of each phase) of each step, or of several steps together in a long run."""
    size = -(-len(rows) // MAX_BARS)
    bars = [_average(rows[start : start + size]) for start in range(0, len(rows), size)]
    names = list(dict.fromkeys(name for _, phases in rows for name in phases))
    frame = _make_frame(
        [(step, 0.0) for step, _ in bars], find_range([0.0, *(sum(phases.values()) for _, phases in bars)], from_zero=True)
    )
    width = max((WIDTH - LEFT - RIGHT) / max(len(bars), 1) * 0.8, 1.0)
    drawn = [frame.draw_axes()]
    for step, phases in bars:
        bottom = 0.0
        for index, name in enumerate(names):
            top = bottom + phases.get(name, 0.0)
            drawn.append(
                f'<rect class="f{index % COLOURS}" x="{frame.left(step) - width / 2:.1f}" width="{width:.1f}" '
                f'y="{frame.top(top):.1f}" height="{max(frame.top(bottom) - frame.top(top), 0.0):.1f}"/>'
            )
            bottom = top
    totals = [(step, sum(phases.values())) for step, phases in rows]
    mean = sum(value for _, value in totals) / len(totals)
    means = {name: sum(phases.get(name, 0.0) for _, phases in rows) / len(rows) for name in names}
    said = f"{title}: {format_number(mean)} in the mean; " + ", ".join(f"{name} {format_number(means[name])}" for name in names)
    figure = _make_figure(title, said, f"mean {format_seconds(mean)}", drawn, frame, thin(totals))
    keys = "".join(f'<li><i class="b{index % COLOURS}"></i>{escape(name)}</li>' for index, name in enumerate(names))
    return figure.replace("</figure>", f'<ul class="legend">{keys}</ul></figure>')


def thin(points: Points, most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Return at most ``most`` points with the extremes of every stretch."""
    if len(points) <= most:
        return list(points)
    size = -(-len(points) // (most // 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        lowest, highest = min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])
        kept += sorted({lowest, highest})
    return kept


def _make_frame(points: Points, y: tuple[float, float]) -> _Frame:
    first, last = points[0][0], points[-1][0]
    margin = max((last - first) * 0.02, 0.5)
    return _Frame((first - margin, last + margin), y)


def _draw_whisker(frame: _Frame, band: tuple[float, float, float]) -> str:
    step, low, high = band
    x = f"{frame.left(step):.1f}"
    return f'<line class="whisker" x1="{x}" x2="{x}" y1="{frame.top(low):.1f}" y2="{frame.top(high):.1f}"/>'


def _average(rows: Sequence[tuple[float, Mapping[str, float]]]) -> tuple[float, dict[str, float]]:
    sums: dict[str, float] = {}
    for _, phases in rows:
        for name, seconds in phases.items():
            sums[name] = sums.get(name, 0.0) + seconds
    return (rows[0][0] + rows[-1][0]) / 2, {name: seconds / len(rows) for name, seconds in sums.items()}


def _make_figure(title: str, said: str, value: str, drawn: Sequence[str], frame: _Frame, points: Points) -> str:
    steps, values, places = (
        " ".join(column)
        for column in zip(*((f"{x:g}", format_number(y), f"{frame.left(x):.1f}") for x, y in points), strict=True)
    )
    return (
        f'<figure data-steps="{steps}" data-values="{values}" data-places="{places}">'
        f'<figcaption><span>{escape(title)}</span><span class="value">{escape(value)}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(said)}">{"".join(drawn)}'
        f'<line class="cursor" y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}" x1="0" x2="0"/></svg></figure>\n'
    )


def make_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers from ``low`` to ``high``, at most ``most`` of them and at least one."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    for factor in (1, 2, 5, 10, 20, 50):
        step = power * factor
        first = math.ceil(low / step - 1e-9)
        last = math.floor((high + 1e-9 * span) / step)
        if last - first < most:
            return [step * number for number in range(first, last + 1)] or [low]
    return [low]


def find_range(
    values: Sequence[float], *, span: float = 0.0, share: bool = False, from_zero: bool = False
) -> tuple[float, float]:
    """Return the ends of an axis: 0 to 1 for a share, else at least ``span`` wide, and not below 0 where no value is."""
    if share:
        return 0.0, 1.0
    low, high = min(values), max(values)
    margin = max((high - low) * 0.06, (span - (high - low)) / 2, abs(high) * 1e-6, 1e-12)
    wide_low, wide_high = low - margin, high + margin
    if low >= 0 and (wide_low < 0 or from_zero):
        wide_low = 0.0
    return wide_low, wide_high


def format_tick(value: float) -> str:
    """Return a short number: 0.25, 12, 3e-05."""
    size = abs(value)
    return (
        "0"
        if size < 1e-12
        else f"{value:.0e}"
        if size < 1e-3 or size >= 1e6
        else f"{value:,.6g}"
        if size < 1000
        else f"{value:,.0f}"
    )
