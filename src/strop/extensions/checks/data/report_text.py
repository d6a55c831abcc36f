"""The report of a data check as text: a table of the entries, the findings with examples, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator

from strop.extensions.checks.data.data_report import DataFinding, DataReport, EntryReport, Lengths
from strop.extensions.checks.report_table import format_table
from strop.safety.printable import make_printable

HEADER = ("data", "rows", "usable", "prompt tokens", "completion tokens", "errors", "warnings")
LEGEND = "tokens: median / 95 % / longest"


def format_report(report: DataReport, *, width: int = 130, colour: bool = False) -> str:
    """Return the report. Texts of the data are made printable."""
    rows = [_make_cells(entry) for entry in report.entries]
    shown = [0, 1, 2, *(column for column in (3, 4) if any(row[column] != "-" for row in rows)), 5, 6]
    table = format_table(
        [HEADER[column] for column in shown], [[row[column] for column in shown] for row in rows], width=width, colour=colour
    )
    lines = [table]
    if 3 in shown:
        lines.append(LEGEND)
    lines += [
        line
        for entry in report.entries
        if entry.error is not None
        for line in ("", make_printable(f"UNCHECKED {entry.key}: {entry.error}"))
    ]
    for entry in report.entries:
        lines += [line for finding in sorted(entry.findings, key=_rank) for line in ("", *_format_finding(entry, finding))]
    notes = [f"note: {entry.key}: {note}" for entry in report.entries for note in entry.notes]
    notes += [f"note: {note}" for note in report.notes]
    lines += ["", *map(make_printable, notes)] if notes else []
    return "\n".join([*lines, "", _format_verdict(report)])


def _make_cells(entry: EntryReport) -> list[str]:
    counts = [sum(finding.severity == severity for finding in entry.findings) for severity in ("error", "warning")]
    looked = "" if entry.rows in (None, entry.looked_at) else f" of {entry.looked_at:,}"
    return [
        make_printable(f"{entry.key}: {entry.name}"),
        "?" if entry.rows is None else f"{entry.rows:,}",
        "-" if entry.error is not None else f"{entry.usable:,}{looked}",
        _format_lengths(entry.prompt),
        _format_lengths(entry.completion),
        *(str(count) if count else "-" for count in counts),
    ]


def _format_lengths(lengths: Lengths | None) -> str:
    return "-" if lengths is None else f"{lengths.median:,} / {lengths.p95:,} / {lengths.longest:,}"


def _rank(finding: DataFinding) -> bool:
    return finding.severity != "error"


def _format_finding(entry: EntryReport, finding: DataFinding) -> Iterator[str]:
    yield make_printable(f"{finding.severity.upper():<8}{finding.check:<14}{entry.key}: {finding.message}")
    for example in finding.examples:
        text = f"  {example.text}" if example.text else ""
        yield make_printable(f"{'':22}{example.location}{text}")
    yield f"{'':22}{finding.fix}"


def _format_verdict(report: DataReport) -> str:
    unchecked = sum(entry.error is not None for entry in report.entries)
    if report.status == "ok":
        return "no findings"
    named = [(report.count("error"), "error"), (report.count("warning"), "warning")]
    words = [f"{count} {word}{'s' * (count > 1)}" for count, word in named if count]
    if unchecked:
        words.append(f"{unchecked} of {len(report.entries)} entries could not be checked")
    return ", ".join(words)
