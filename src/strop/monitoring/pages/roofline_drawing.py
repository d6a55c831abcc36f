"""Rooflines as SVG: operators and passes by FLOPs a byte and FLOPs a second, under the ceilings of their device.

Both axes are logarithmic. The area of a mark is its share of the operators' time, its form and colour the kind. Operators that only move
bytes have no place here; the table has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from strop.monitoring.pages.markup import escape
from strop.monitoring.roofline.operator_rows import OperatorRow
from strop.monitoring.roofline.operator_work import ATTENTION, ELEMENTWISE, LOGPROBS, OPTIMIZER, PRODUCTS, REDUCTIONS, SOFTMAX
from strop.monitoring.roofline.roofline_text import PASS_NAMES, format_rate, name_row
from strop.monitoring.roofline.step_roofline import PassTotals, ProcessRoofline, StepRoofline, find_place

WIDTH, LEFT, RIGHT, TOP, BOTTOM, PLOT = 720.0, 74.0, 18.0, 44.0, 44.0, 330.0
LINE = 17.0  # of the key below
LEAST_SHARE = 0.003  # of the operators' time: smaller ones are not drawn
NUMBERED = 6  # operators that the key explains
MOST_PROCESSES = 8

# Kinds that are drawn alike: name, class of the page's style, form.
GROUPS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("matrix products", (PRODUCTS,), "circle"),
    ("attention", (ATTENTION,), "square"),
    ("norms, softmax, log-probabilities", (SOFTMAX, LOGPROBS), "up"),
    ("elementwise, reductions", (ELEMENTWISE, REDUCTIONS), "down"),
    ("optimizer", (OPTIMIZER,), "cross"),
    ("others", (), "circle"),
)
STYLE = (
    "svg{background:#fff;color-scheme:light dark;font:11px system-ui,sans-serif}text{fill:#5b6068}.strong{fill:#1d1f22}"
    ".grid{stroke:#d5d8dc}.roof{stroke:#1d1f22;fill:none;stroke-width:1.6}.near{stroke:#5b6068;fill:none;stroke-dasharray:5 4}"
    ".mark{fill-opacity:.75;stroke:#fff;stroke-width:.8}.pass{fill:none;stroke:#1d1f22;stroke-width:1.8}"
    ".f0{fill:#0072b2}.f1{fill:#c25400}.f2{fill:#007a5a}.f3{fill:#9c4f85}.f4{fill:#8a6d00}.f5{fill:#6b6b6b}"
    "@media(prefers-color-scheme:dark){svg{background:#16181b}text{fill:#a3a8b0}.strong{fill:#e6e7e9}.grid{stroke:#3a3e45}"
    ".roof,.pass{stroke:#e6e7e9}.near{stroke:#a3a8b0}.mark{stroke:#16181b}"
    ".f0{fill:#5fb0e6}.f1{fill:#f0944d}.f2{fill:#3fc59b}.f3{fill:#dc9bc8}.f4{fill:#dcc04a}.f5{fill:#a8a8a8}}"
)


@dataclass(frozen=True)
class _Mark:
    """A point: FLOPs a byte, FLOPs a second, and what it is."""

    x: float
    y: float
    share: float  # of the time
    group: int
    text: str


@dataclass(frozen=True)
class _Axes:
    """Where values are: both ranges in powers of ten."""

    x: tuple[float, float]
    y: tuple[float, float]

    def left(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(value) - self.x[0]) / (self.x[1] - self.x[0])

    def top(self, value: float) -> float:
        return TOP + PLOT - PLOT * (math.log10(value) - self.y[0]) / (self.y[1] - self.y[0])


def draw_rooflines(found: StepRoofline) -> str:
    """Return an SVG file with a panel for each process that has operators, at most eight."""
    shown = [each for each in found.processes if _list_marks(each)][:MOST_PROCESSES]
    panels, height = [], 0.0
    for each in shown:
        drawn, used = draw_process(each, f"step {found.step}, {each.name}")
        panels.append(f'<g transform="translate(0 {height:.0f})">{drawn}</g>')
        height += used
    if not panels:
        panels, height = ['<text x="12" y="24">No operator of this step has a known number of FLOPs.</text>'], 40.0
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" width="{WIDTH:g}" height="{height:g}">'
        f"<style>{STYLE}</style>{''.join(panels)}</svg>\n"
    )


def draw_figure(each: ProcessRoofline, title: str) -> str:
    """Return one process as a figure of a page; empty if nothing of it can be drawn."""
    if not _list_marks(each):
        return ""
    drawn, height = draw_process(each, title)
    said = f"Roofline of {title}: {each.ceilings.device if each.ceilings else 'a device whose ceilings are not known'}"
    return (
        f'<figure><figcaption><span>{escape(title)}</span></figcaption><svg class="roofline" viewBox="0 0 {WIDTH:g} {height:g}" '
        f'role="img" aria-label="{escape(said)}">{drawn}</svg></figure>\n'
    )


def draw_process(each: ProcessRoofline, title: str) -> tuple[str, float]:
    """Return a panel as markup, and its height."""
    marks, passes = _list_marks(each), [one for one in each.passes if one.flops and one.moved]
    axes = _find_axes(each, marks, passes)
    device = each.ceilings.device if each.ceilings is not None else "ceilings not known"
    drawn = [
        f'<text class="strong" x="{LEFT:g}" y="18" font-size="14" font-weight="600">{escape(title)}</text>',
        f'<text x="{LEFT:g}" y="34">{escape(device)}; the area of a mark is its share of the operators&#39; time</text>',
        _draw_grid(axes),
        _draw_roofs(each, axes, {row.precision for row in each.rows if row.flops}),
        *(_draw_mark(mark, axes, number) for number, mark in enumerate(marks)),
        *(_draw_pass(one, axes) for one in passes),
    ]
    key, height = _draw_key(marks, TOP + PLOT + BOTTOM)
    return "".join((*drawn, key)), height


def _list_marks(each: ProcessRoofline) -> list[_Mark]:
    """Return the operators that have a place, the longest first."""
    total = each.operator_seconds
    rows = [row for row in each.rows if row.flops > 0 and row.moved > 0 and row.seconds > LEAST_SHARE * total]
    return [_make_mark(row, each, row.seconds / total) for row in sorted(rows, key=lambda row: -row.seconds)]


def _make_mark(row: OperatorRow, each: ProcessRoofline, share: float) -> _Mark:
    place = find_place(row, each.ceilings)
    group = next((index for index, (_, kinds, _) in enumerate(GROUPS) if row.kind in kinds), len(GROUPS) - 1)
    near = f", {100 * place.share:.0f} % of the roof" if place.bound else ""
    phase = f"{PASS_NAMES.get(row.phase, row.phase)}: " if row.phase else ""
    text = f"{phase}{name_row(row)}: {100 * share:.1f} % of the time{near}"
    return _Mark(place.intensity, place.rate, share, group, text)


def _find_axes(each: ProcessRoofline, marks: Sequence[_Mark], passes: Sequence[PassTotals]) -> _Axes:
    places = [find_place(one, each.ceilings) for one in passes]
    xs = [mark.x for mark in marks] + [place.intensity for place in places]
    ys = [mark.y for mark in marks] + [place.rate for place in places]
    if each.ceilings is not None:
        peak = max(each.ceilings.flops.values())
        ys.append(1.5 * peak)
        xs.append(3 * peak / each.ceilings.bandwidth)
    low, high = math.log10(min(xs)) - 0.3, math.log10(max(xs)) + 0.3
    return _Axes((low, high), (math.log10(min(ys)) - 0.3, math.log10(max(ys)) + 0.2))


def _draw_grid(axes: _Axes) -> str:
    right, bottom = WIDTH - RIGHT, TOP + PLOT
    drawn = []
    for power in range(math.ceil(axes.x[0]), math.floor(axes.x[1]) + 1):
        x = axes.left(10.0**power)
        drawn.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP:g}" y2="{bottom:g}"/>'
            f'<text x="{x:.1f}" y="{bottom + 16:g}" text-anchor="middle">{10.0**power:g}</text>'
        )
    for power in range(math.ceil(axes.y[0]), math.floor(axes.y[1]) + 1):
        y = axes.top(10.0**power)
        drawn.append(
            f'<line class="grid" x1="{LEFT:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">{format_rate(10.0**power)}</text>'
        )
    drawn.append(f'<text x="{right:g}" y="{bottom + 32:g}" text-anchor="end">FLOPs a byte</text>')
    drawn.append(f'<text x="{LEFT - 6:g}" y="{TOP - 8:g}" text-anchor="end">FLOP/s</text>')
    return "".join(drawn)


def _draw_roofs(each: ProcessRoofline, axes: _Axes, used: set[str]) -> str:
    """Draw the slope of the memory, and for each number format in use its peak; of a processor the slope of its cache, dashed."""
    ceilings = each.ceilings
    if ceilings is None:
        return ""
    low, high = 10.0 ** axes.x[0], 10.0 ** axes.x[1]
    peaks = {name: rate for name, rate in ceilings.flops.items() if name in used} or dict(ceilings.flops)
    drawn = []
    slopes = [(ceilings.bandwidth, "roof", "memory")]
    if ceilings.cache_bandwidth and ceilings.cache_bandwidth > 1.1 * ceilings.bandwidth:
        slopes.append((ceilings.cache_bandwidth, "near", "cache"))
    for bandwidth, kind, name in slopes:
        start = max(low, 10.0 ** axes.y[0] / bandwidth)
        ridge = max(peaks.values()) / bandwidth
        ends = [(start, start * bandwidth), (ridge, ridge * bandwidth)]
        (x1, y1), (x2, y2) = [(axes.left(x), axes.top(y)) for x, y in ends]
        drawn.append(f'<path class="{kind}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>')
        angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
        x, y = x1 + 0.12 * (x2 - x1), y1 + 0.12 * (y2 - y1)
        turn = f"rotate({angle:.1f} {x:.1f} {y - 5:.1f})"
        drawn.append(f'<text x="{x:.1f}" y="{y - 5:.1f}" transform="{turn}">{name} {format_rate(bandwidth)}B/s</text>')
    for name, rate in peaks.items():
        x, y = axes.left(rate / ceilings.bandwidth), axes.top(rate)
        drawn.append(
            f'<path class="roof" d="M{x:.1f} {y:.1f}L{axes.left(high):.1f} {y:.1f}"/>'
            f'<text x="{axes.left(high) - 4:.1f}" y="{y - 5:.1f}" text-anchor="end">{name} {format_rate(rate)}FLOP/s</text>'
        )
    return "".join(drawn)


def _draw_mark(mark: _Mark, axes: _Axes, number: int) -> str:
    x, y, size = axes.left(mark.x), axes.top(mark.y), 3.0 + 16.0 * math.sqrt(mark.share)
    shape = _form(GROUPS[mark.group][2], x, y, size)
    drawn = f'<g class="mark f{mark.group}"><title>{escape(mark.text)}</title>{shape}</g>'
    if number < NUMBERED:
        drawn += f'<text class="strong" x="{x + size + 2:.1f}" y="{y + 4:.1f}">{number + 1}</text>'
    return drawn


def _form(form: str, x: float, y: float, size: float) -> str:
    if form == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}"/>'
    half = 0.89 * size  # of a square of the same area
    if form == "square":
        return f'<rect x="{x - half:.1f}" y="{y - half:.1f}" width="{2 * half:.1f}" height="{2 * half:.1f}"/>'
    sides: tuple[tuple[float, float], ...]
    if form == "cross":
        a, b = 1.25 * size, 0.42 * size
        quarter = ((-b, -a), (b, -a), (b, -b), (a, -b), (a, b), (b, b))
        sides = (*quarter, *((-dx, -dy) for dx, dy in quarter))
    else:
        up = 1.0 if form == "up" else -1.0
        sides = ((0.0, -1.35 * up * size), (1.2 * size, 0.75 * up * size), (-1.2 * size, 0.75 * up * size))
    return f'<path d="M{"L".join(f"{x + dx:.1f} {y + dy:.1f}" for dx, dy in sides)}Z"/>'


def _draw_pass(one: PassTotals, axes: _Axes) -> str:
    place = find_place(one, None)
    x, y = axes.left(place.intensity), axes.top(place.rate)
    said = f"{PASS_NAMES[one.name]}, the whole pass: {one.seconds:.3g} s, {format_rate(place.rate)}FLOP/s"
    corners = f"M{x:.1f} {y - 8:.1f}L{x + 8:.1f} {y:.1f}L{x:.1f} {y + 8:.1f}L{x - 8:.1f} {y:.1f}Z"
    label = f'x="{x:.1f}" y="{y + 21:.1f}" text-anchor="middle" font-weight="600"'
    return (
        f'<path class="pass" d="{corners}"><title>{escape(said)}</title></path>'
        f'<text class="strong" {label}>{escape(PASS_NAMES[one.name])}</text>'
    )


def _draw_key(marks: Sequence[_Mark], top: float) -> tuple[str, float]:
    """Return the key below a plot, and where it ends."""
    drawn, x = [], LEFT
    for index in sorted({mark.group for mark in marks}):
        name, _, form = GROUPS[index]
        drawn.append(
            f'<g class="mark f{index}">{_form(form, x + 5, top - 4, 5)}</g><text x="{x + 14:g}" y="{top:g}">{name}</text>'
        )
        x += 26 + 5.6 * len(name)
    drawn.append(
        f'<path class="pass" d="M{x + 5:g} {top - 10:g}l6 6l-6 6l-6 -6Z"/><text x="{x + 16:g}" y="{top:g}">a whole pass</text>'
    )
    for number, mark in enumerate(marks[:NUMBERED], 1):
        top += LINE
        drawn.append(f'<text x="{LEFT:g}" y="{top:g}"><tspan class="strong">{number}</tspan>  {escape(mark.text)}</text>')
    return "".join(drawn), top + 2 * LINE
