"""``metrics.jsonl``: one JSON object a step, with its key ``step``. The record of a run.

    {"step": 12, "train/reward": 0.53, "train/loss": null, "nonfinite": {"train/loss": "nan"}}

JSON has no NaN and no infinity: such a value is written as null, and ``nonfinite`` says which it was. A line is on disk
(fsync) when ``log`` returns. A step that is logged again becomes one object with the keys of both, and the file is
replaced in one move; that costs a copy of the file, so say what you know of a step in one call where you can.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from strop.tracking.atomic import replacing
from strop.tracking.base import Silent

FILE_NAME = "metrics.jsonl"


class MalformedMetrics(ValueError):
    """A line of metrics.jsonl that is not a step; the message says which and what can be done."""


class JsonlTracker(Silent):
    """Writes ``<log_dir>/metrics.jsonl``. Opening it mends a last line that a kill cut in half."""

    def __init__(self, log_dir: Path) -> None:
        self.path = Path(log_dir) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _mend(self.path)
        self._last = _last_step(self.path)
        self._file: TextIO | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._last is not None and step < self._last:
            raise ValueError(
                f"step {step} was logged after step {self._last}, which {self.path} already holds; a run that continues from "
                f"an earlier step must call resume({step - 1}) first, and a new run needs a log folder of its own"
            )
        if step == self._last:
            self._merge(step, metrics)
        else:
            self._append(encode(step, metrics))
            self._last = step

    def resume(self, step: int) -> None:
        kept = {known: line for known, line in _lines(self.path) if known <= step}
        self._replace(list(kept.values()))
        self._last = max(kept, default=None)

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
        lines = list(_lines(self.path))
        known = decode(lines[-1][1])[1]
        self._replace([line for _, line in lines[:-1]] + [encode(step, {**known, **metrics})])

    def _replace(self, lines: list[str]) -> None:
        self.close()  # the open file is the old one once the new one has its name
        if not lines and not self.path.exists():
            return
        with replacing(self.path) as draft:
            draft.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def encode(step: int, metrics: Mapping[str, float]) -> str:
    if reserved := {"step", "nonfinite"} & metrics.keys():
        raise ValueError(f"a metric cannot be called {reserved.pop()!r}: the lines of {FILE_NAME} use that key themselves")
    values = {name: float(value) for name, value in metrics.items()}
    nonfinite = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
    line: dict[str, object] = {"step": step}
    line |= {name: None if name in nonfinite else value for name, value in values.items()}
    if nonfinite:
        line["nonfinite"] = nonfinite
    return json.dumps(line, ensure_ascii=False, allow_nan=False)


def decode(line: str) -> tuple[int, dict[str, float]]:
    """The step of a line and its metrics; the inverse of ``encode``. Raises ValueError where it is not one."""
    found = json.loads(line)
    if not isinstance(found, dict) or not isinstance(found.get("step"), int):
        raise ValueError('expected an object with an integer "step"')
    nonfinite = found.pop("nonfinite", {})
    step = found.pop("step")
    values = {name: nonfinite.get(name, "nan") if value is None else value for name, value in found.items()}
    return step, {name: float(value) for name, value in values.items() if _number(value)}


def read_metrics(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Every step of a metrics.jsonl, also while a run is writing it: a half-written last line is left out."""
    return [decode(line) for _, line in _lines(path)]


def _number(value: object) -> bool:
    return isinstance(value, int | float) or value in ("nan", "inf", "-inf")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield decode(line)[0], line
        except (ValueError, TypeError) as error:
            if number == len(lines):  # no newline after it: a write that was cut, or is going on
                return
            raise MalformedMetrics(
                f"{path}, line {number}, is not a step's metrics ({error}): {line[:80]!r}; "
                "a kill can only cut the last line, so something else wrote here: repair or remove that line"
            ) from None


def _mend(path: Path) -> None:
    """Ends the file with a whole line. Costs nothing where it does."""
    if not path.exists() or _ends_whole(path):
        return
    lines = [line for _, line in _lines(path)]
    with replacing(path) as draft:
        draft.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _last_step(path: Path) -> int | None:
    steps = [step for step, _ in _lines(path)]
    return steps[-1] if steps else None
