"""Errors of a configuration: where, what was found, why it cannot work, and what to set.

Problem      one error (or warning) about one key
ConfigError  all errors of a configuration
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.safety.printable import redact_text, shorten

COMMAND_LINE, PYTHON = "command line", "Python"
LONGEST_MESSAGE, LONGEST_FIX, MOST_LISTED = 2_000, 900, 30  # characters of a message and of a fix; problems listed by an error


@dataclass(frozen=True)
class Origin:
    """Where a value was set: a file and a line, or the command line."""

    source: Path | str
    line: int | None = None  # counted from 1

    def __str__(self) -> str:
        return f"{self.source}" if self.line is None else f"{self.source}, line {self.line}"


@dataclass(frozen=True)
class Problem:
    """One error or warning. ``key`` is dotted; "" is the whole configuration."""

    key: str
    message: str  # what was found and why it cannot work
    fix: str = ""  # what to set instead
    origin: Origin | None = None

    def __str__(self) -> str:
        where = ": ".join(shorten(str(part), 200) for part in (self.origin, self.key) if part)
        text = f"{where}: {shorten(self.message, LONGEST_MESSAGE)}" if where else shorten(self.message, LONGEST_MESSAGE)
        return redact_text(f"{text}\n    {shorten(self.fix, LONGEST_FIX)}" if self.fix else text)


class ConfigError(Exception):
    """A configuration that cannot be used. The message lists every problem found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(str(self))

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        listed = "\n".join(f"{number}. {problem}" for number, problem in enumerate(self.problems[:MOST_LISTED], 1))
        more = f"\nand {len(self.problems) - MOST_LISTED} more" if len(self.problems) > MOST_LISTED else ""
        return f"{len(self.problems)} problems in the configuration:\n{listed}{more}"


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise ValueError with the problems, if there are any."""
    if found := [str(problem) for problem in problems]:
        raise ValueError("\n".join(found))
