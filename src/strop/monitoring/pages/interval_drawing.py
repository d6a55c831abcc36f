"""Differences with their intervals as inline SVG: a row each, and a line at 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from strop.monitoring.pages.axis_ticks import find_range, format_tick, make_ticks
from strop.monitoring.pages.markup import escape
from strop.safety.printable import shorten

WIDTH, NAMES, RIGHT, ROW, TOP, BOTTOM = 640.0, 170.0, 14.0, 26.0, 6.0, 20.0
NAME_LIMIT = 26  # characters


@dataclass(frozen=True)
class ShownDifference:
    """A difference in the unit of the picture; an end that is not finite reaches the edge."""

    name: str
    value: float
    low: float
    high: float


def draw_differences(rows: Sequence[ShownDifference], title: str) -> str:
    """Return the figure."""
    ends = [end for row in rows for end in (row.value, row.low, row.high, 0.0) if math.isfinite(end)]
    low, high = min(ends), max(ends)
    margin = max((high - low) * 0.06, 1e-9)
    axis = (low - margin, high + margin) if high > low else find_range(ends)
    height = TOP + ROW * len(rows) + BOTTOM

    def left(value: float) -> float:
        inside = min(max(value, axis[0]), axis[1])
        return NAMES + (WIDTH - NAMES - RIGHT) * (inside - axis[0]) / (axis[1] - axis[0])

    drawn = [
        f'<line class="grid" x1="{left(tick):.1f}" x2="{left(tick):.1f}" y1="{TOP:g}" y2="{height - BOTTOM:g}"/>'
        f'<text x="{left(tick):.1f}" y="{height - 5:g}" text-anchor="middle">{format_tick(tick)}</text>'
        for tick in make_ticks(*axis, most=7)
    ]
    drawn.append(f'<line class="reference" x1="{left(0):.1f}" x2="{left(0):.1f}" y1="{TOP:g}" y2="{height - BOTTOM:g}"/>')
    for index, row in enumerate(rows):
        y = TOP + ROW * (index + 0.5)
        drawn.append(
            f'<text x="{NAMES - 10:g}" y="{y + 4:.1f}" text-anchor="end">{escape(shorten(row.name, NAME_LIMIT, ""))}</text>'
            f'<line class="whisker" x1="{left(row.low):.1f}" x2="{left(row.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<circle class="f0" r="4" cx="{left(row.value):.1f}" cy="{y:.1f}"/>'
        )
    said = f"{title}: " + "; ".join(f"{row.name} {row.value:+.4g}, from {row.low:+.4g} to {row.high:+.4g}" for row in rows)
    return (
        f'<figure class="intervals" tabindex="0"><figcaption><span>{escape(title)}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(said)}">{"".join(drawn)}</svg></figure>\n'
    )
