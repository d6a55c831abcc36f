"""Rooflines as text: where the time of a step's operators goes, how far each is from the roof, and what bounds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from strop.monitoring.roofline.operator_rows import OperatorRow
from strop.monitoring.roofline.operator_work import OUTSIDE
from strop.monitoring.roofline.step_roofline import PassTotals, ProcessRoofline, StepRoofline, find_place
from strop.safety.printable import make_printable

PASS_NAMES: Mapping[str, str] = {
    "prefill": "prefill",
    "decode": "decode",
    "forward": "forward",
    "backward": "backward",
    "step": "optimizer step",
}
SHAPES_LIMIT = 44  # characters of a table
PASS_HEADER = ("pass", "calls", "seconds", "FLOP/s", "B/s", "FLOPs a byte", "of the roof", "bound by")
HEADER = ("operator", "pass", "calls", "seconds", "share", "FLOP/s", "B/s", "FLOPs a byte", "of the roof", "bound by")


def format_roofline(found: StepRoofline, rows: int) -> str:
    """Return the tables of a step; of each process the longest ``rows`` operators."""
    return "\n\n".join(
        [f"step {found.step}: {found.seconds:.3g} s", *(_format_process(each, found.seconds, rows) for each in found.processes)]
    )


def summarize_roofline(found: StepRoofline) -> str:
    """Return in a line what the process with most operators does with its time."""
    each = max(found.processes, key=lambda process: process.operator_seconds)
    total = each.operator_seconds
    if not total:
        return "no operator was recorded"
    kinds = list_kinds(each)
    longest, seconds = next(iter(kinds.items()))
    rows = [row for row in each.rows if row.kind == longest]
    least = sum(find_place(row, each.ceilings).share * row.seconds for row in rows)
    near = f" at {100 * least / seconds:.0f} % of the roof" if each.ceilings is not None and least else ""
    return f"{each.name}: {longest} are {100 * seconds / total:.0f} % of the operators' {total:.3g} s{near}"


def list_kinds(each: ProcessRoofline) -> dict[str, float]:
    """Return the seconds of each kind of operator, the longest first."""
    found: dict[str, float] = {}
    for row in each.rows:
        if row.kind != OUTSIDE:
            found[row.kind] = found.get(row.kind, 0.0) + row.seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def describe_ceilings(each: ProcessRoofline) -> str:
    """Return in words what a process's device can do."""
    ceilings = each.ceilings
    if ceilings is None:
        return "the ceilings of its device are not known: it is not in the table of devices"
    peaks = ", ".join(f"{format_rate(rate)}FLOP/s in {name}" for name, rate in ceilings.flops.items())
    cache = f", cache {format_rate(ceilings.cache_bandwidth)}B/s" if ceilings.cache_bandwidth else ""
    return f"{ceilings.device}: {peaks}, memory {format_rate(ceilings.bandwidth)}B/s{cache} ({ceilings.source})"


def make_pass_rows(each: ProcessRoofline) -> list[tuple[str, ...]]:
    """Return a row of PASS_HEADER for each kind of pass."""
    return [
        (
            PASS_NAMES.get(one.name, one.name),
            f"{one.calls:,}",
            f"{one.seconds:.4g}",
            *_format_place(one, each, counted=bool(one.moved)),
        )
        for one in each.passes
    ]


def make_operator_rows(each: ProcessRoofline, most: int) -> list[tuple[str, ...]]:
    """Return a row of HEADER for each of the longest operators."""
    total = each.operator_seconds or 1.0
    shown = [row for row in each.rows if row.kind != OUTSIDE][:most]
    return [
        (
            name_row(row),
            PASS_NAMES.get(row.phase, row.phase),
            f"{row.calls:,}",
            f"{row.seconds:.4g}",
            f"{100 * row.seconds / total:.1f} %",
            *_format_place(row, each, counted=row.counted and bool(row.moved)),
        )
        for row in shown
    ]


def describe_pass(one: PassTotals) -> str:
    """Return what a pass over tokens says beside its rates; empty for others."""
    if not one.sequences or not one.seconds:
        return ""
    return (
        f"decode: {one.sequences / one.seconds:,.0f} tokens/s, {one.sequences / max(one.calls, 1):.1f} sequences a step, "
        f"{format_rate(one.moved / one.sequences)}B of weights and cache a token"
    )


def describe_rest(each: ProcessRoofline) -> str:
    """Return what is not operators: Python, and what torch does not report."""
    outside: dict[str, float] = {}
    for row in each.rows:
        if row.kind == OUTSIDE:
            outside[row.phase] = outside.get(row.phase, 0.0) + row.seconds
    parts = [f"{seconds:.3g} s of {PASS_NAMES.get(name, name)}" for name, seconds in outside.items() if seconds >= 0.0005]
    return f"outside of torch's operators: {', '.join(parts)}" if parts else ""


def name_row(row: OperatorRow) -> str:
    """Return the name of an operator with its shapes, short and printable."""
    name = make_printable(row.name.removeprefix("aten::"))
    shapes = row.shapes if len(row.shapes) <= SHAPES_LIMIT else f"{row.shapes[: SHAPES_LIMIT - 3]}..."
    kind = f" ({row.kind})" if row.kind not in (row.name, "matrix products", "attention") else ""
    return " ".join(part for part in (name + kind, make_printable(shapes)) if part)


def format_rate(value: float) -> str:
    """Return a number with a prefix: 4.2 G, 310 M; the unit follows at once."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "


def _format_place(each: OperatorRow | PassTotals, process: ProcessRoofline, *, counted: bool) -> tuple[str, ...]:
    if not counted:
        return "", "", "", "", ""
    place = find_place(each, process.ceilings)
    share = f"{100 * place.share:.0f} %" if place.bound else ""
    intensity = f"{place.intensity:.3g}" if each.flops else "0"
    return format_rate(place.rate) if each.flops else "0", format_rate(place.bandwidth), intensity, share, place.bound


def _format_process(each: ProcessRoofline, seconds: float, rows: int) -> str:
    if not each.rows:
        return f"{each.name}: {make_printable(each.note) or 'no operator was recorded'}"
    total = each.operator_seconds
    lines = [f"{each.name}: {describe_ceilings(each)}", ""]
    if each.passes:
        lines += [*_align(PASS_HEADER, make_pass_rows(each)), ""]
        lines += [line for line in (*map(describe_pass, each.passes), describe_rest(each)) if line]
    kinds = ", ".join(f"{name} {100 * part / total:.0f} %" for name, part in list_kinds(each).items() if part >= 0.005 * total)
    what = "kernels" if each.on_device else "operators"
    lines += [f"{what}: {total:.4g} s of the step's {seconds:.4g} s; {kinds}", ""]
    lines += _align(HEADER, make_operator_rows(each, rows))
    return "\n".join(lines)


def _align(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Return the lines of a table whose first column is text."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    left = {"operator", "pass", "bound by"}
    for row in (header, *rows):
        cells = (
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        )
        yield "  ".join(cells).rstrip()
