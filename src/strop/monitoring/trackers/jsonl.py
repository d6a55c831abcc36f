"""``metrics.jsonl``: one JSON object per step, with the key ``step``.

    {"step": 12, "train/reward": 0.53, "train/loss": null, "nonfinite": {"train/loss": "nan"}}

JSON has no NaN or infinity: such a value is written as null, and ``nonfinite`` names it. A line is on disk (fsync) when
``log`` returns. Logging a step again merges the keys into one object and rewrites the file atomically. That copies the file,
so log a step in a single call where possible.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from strop.monitoring.atomic_file import atomic_write
from strop.monitoring.trackers.base import NullTracker

METRICS_FILE = "metrics.jsonl"


class MalformedMetrics(ValueError):
    """A line of metrics.jsonl is not a step. The message says which line and what to do."""


class JsonlTracker(NullTracker):
    """Writes ``<log_dir>/metrics.jsonl``. Opening it removes a last line that a kill truncated."""

    def __init__(self, log_dir: Path) -> None:
        self.path = Path(log_dir) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _repair(self.path)
        self._last_step = _find_last_step(self.path)
        self._file: TextIO | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._last_step is not None and step < self._last_step:
            raise ValueError(
                f"step {step} was logged after step {self._last_step}, which is already in {self.path}; a run that continues from "
                f"an earlier step must call resume({step - 1}) first, and a new run needs a log folder of its own"
            )
        if step == self._last_step:
            self._merge(step, metrics)
        else:
            self._append(encode_line(step, metrics))
            self._last_step = step

    def resume(self, step: int) -> None:
        lines = {logged_step: line for logged_step, line in _read_lines(self.path) if logged_step <= step}
        self._replace(list(lines.values()))
        self._last_step = max(lines, default=None)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, line: str) -> None:
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(line + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _merge(self, step: int, metrics: Mapping[str, float]) -> None:
        lines = list(_read_lines(self.path))
        previous = decode_line(lines[-1][1])[1]
        self._replace([line for _, line in lines[:-1]] + [encode_line(step, {**previous, **metrics})])

    def _replace(self, lines: list[str]) -> None:
        self.close()  # after the rename the open file would be the old one
        if not lines and not self.path.exists():
            return
        with atomic_write(self.path) as temporary:
            temporary.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def encode_line(step: int, metrics: Mapping[str, float]) -> str:
    """Return the line of a step. Raises ValueError for a metric with a reserved name."""
    if reserved := {"step", "nonfinite"} & metrics.keys():
        raise ValueError(f"a metric cannot be called {reserved.pop()!r}: {METRICS_FILE} reserves this key; rename the metric")
    values = {name: float(value) for name, value in metrics.items()}
    nonfinite = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
    line: dict[str, object] = {"step": step}
    line |= {name: None if name in nonfinite else value for name, value in values.items()}
    if nonfinite:
        line["nonfinite"] = nonfinite
    return json.dumps(line, ensure_ascii=False, allow_nan=False)


def decode_line(line: str) -> tuple[int, dict[str, float]]:
    """Parse a line into (step, metrics), the inverse of ``encode_line``. Raises ValueError for an invalid line."""
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError('expected an object with an integer "step"')
    nonfinite = row.pop("nonfinite", {})
    step = row.pop("step")
    values = {name: nonfinite.get(name, "nan") if value is None else value for name, value in row.items()}
    return step, {name: float(value) for name, value in values.items() if _is_number(value)}


def read_metrics(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Read all steps of a metrics.jsonl, even while a run writes it: an incomplete last line is skipped. Raises MalformedMetrics."""
    return [decode_line(line) for _, line in _read_lines(path)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or value in ("nan", "inf", "-inf")


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield decode_line(line)[0], line
        except (ValueError, TypeError) as error:
            if number == len(lines):  # no newline after it: a truncated or ongoing write
                return
            raise MalformedMetrics(
                f"{path}, line {number}, is not a step's metrics ({error}): {line[:80]!r}; "
                "a kill can truncate only the last line, so something else changed the file: repair or remove this line"
            ) from None


def _repair(path: Path) -> None:
    """Remove an incomplete last line, if there is one."""
    if not path.exists() or _ends_with_newline(path):
        return
    lines = [line for _, line in _read_lines(path)]
    with atomic_write(path) as temporary:
        temporary.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _find_last_step(path: Path) -> int | None:
    steps = [step for step, _ in _read_lines(path)]
    return steps[-1] if steps else None
