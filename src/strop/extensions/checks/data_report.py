"""Report tables, for a terminal or a pipe."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from strop.safety.printable import make_printable


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int, colour: bool) -> str:
    """Return a table: the first column is text, the others are numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, safe_box=True)
    for number, name in enumerate(header):
        if number:
            table.add_column(Text(name), justify="right", no_wrap=True)
        else:
            table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    out = io.StringIO()
    console = Console(
        file=out, width=max(width, 60), force_terminal=colour, color_system="standard" if colour else None, legacy_windows=False
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().replace("\u2500", "-").strip("\n").split("\n"))


DataKind = Literal["tasks", "conversations", "preferences", "judgements"]
Severity = Literal["error", "warning"]
Status = Literal["unchecked", "error", "warning", "ok"]

ROW_CHECKS: dict[str, Severity] = {  # what rows are looked at for, and how bad it is
    "unreadable": "error",
    "too_long": "error",
    "template": "error",
    "image": "error",
    "empty": "error",
    "answer": "error",
    "overlap": "error",
    "contamination": "error",
    "rewritten": "warning",
    "duplicate": "warning",
}
MOST_EXAMPLES = 3


@dataclass(frozen=True)
class FaultyRow:
    location: str  # file:line, or the row
    text: str


@dataclass(frozen=True, kw_only=True)
class DataFinding:
    check: str  # of ``ROW_CHECKS``
    message: str  # what was found
    fix: str  # what to do
    count: int  # rows
    examples: tuple[FaultyRow, ...] = ()

    @property
    def severity(self) -> Severity:
        return ROW_CHECKS[self.check]


@dataclass(frozen=True)
class Lengths:
    """Tokens of the prompts or the completions of an entry."""

    median: int
    p95: int
    longest: int


@dataclass
class EntryReport:
    """What was found of one entry of the data."""

    key: str  # data.train.0
    name: str  # of its data
    rows: int | None = None  # None: unknown, of a stream
    error: str | None = None  # why it could not be opened at all
    looked_at: int = 0
    usable: int = 0
    prompt: Lengths | None = None  # None: the tokenizer is not on this machine
    completion: Lengths | None = None
    findings: list[DataFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was not looked at, and why


@dataclass(frozen=True)
class DataReport:
    """What was found of all entries."""

    entries: Sequence[EntryReport]
    notes: Sequence[str] = ()
    seconds: float = 0.0

    @property
    def findings(self) -> Iterator[DataFinding]:
        return (finding for entry in self.entries for finding in entry.findings)

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def status(self) -> Status:
        if any(entry.error is not None for entry in self.entries):
            return "unchecked"
        return "error" if self.count("error") else "warning" if self.count("warning") else "ok"

    def as_dict(self) -> dict[str, Any]:
        """Return the report for ``--json``."""
        entries = [
            {
                **asdict(entry),
                "findings": [{"severity": finding.severity, **asdict(finding)} for finding in entry.findings],
            }
            for entry in self.entries
        ]
        return {"status": self.status, "entries": entries, "notes": list(self.notes), "seconds": round(self.seconds, 1)}


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
