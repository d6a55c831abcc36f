"""What a check of the data found: as data and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

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
    "as_text": "warning",
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
