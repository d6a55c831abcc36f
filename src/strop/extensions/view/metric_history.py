"""The metrics of a run by columns, read on as the run writes them."""

from __future__ import annotations

import json
import math
import os
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from strop.extensions.view.view_error import ViewError
from strop.sampling import is_finite

STEP_TIME = "timing/train/total_step_time"
LAST_BYTES = 65_536  # of the file, in which the last step is looked for
MOST_POINTS = 20_000


class MetricHistory:
    """Reads ``metrics.jsonl``. Only what was added is parsed again. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._last: tuple[tuple[int, int], int] = ((-1, -1), 0)
        self._forget()

    def _forget(self) -> None:
        self._identity: tuple[int, int] = (-1, -1)  # device and inode: a resume replaces the file
        self._offset = 0
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}

    def last_step_on_disk(self) -> int:
        """Return the last logged step, from the end of the file alone; 0 if there is none."""
        try:
            found = self.path.stat()
            stamp = (found.st_size, found.st_mtime_ns)
            if self._last[0] != stamp:
                with self.path.open("rb") as file:
                    file.seek(max(found.st_size - LAST_BYTES, 0))
                    self._last = (stamp, _last_step(file.read().split(b"\n")))
        except OSError:
            return 0
        return self._last[1]

    def names(self) -> list[str]:
        with self._lock:
            self._read_on()
            return sorted(self._columns)

    def last_step(self) -> int:
        with self._lock:
            self._read_on()
            return self._steps[-1] if self._steps else 0

    def at(self, step: int) -> dict[str, float]:
        """Return the metrics of a step that are finite; none if it is not logged."""
        with self._lock:
            self._read_on()
            places = np.flatnonzero(np.asarray(self._steps) == step)
            if not len(places):
                return {}
            values = {name: _padded(column, len(self._steps))[places[-1]] for name, column in self._columns.items()}
        return {name: float(value) for name, value in values.items() if np.isfinite(value)}

    def series(self, names: Sequence[str], since: int | None, points: int) -> dict[str, Any]:
        """Return metrics by step: ``steps`` [T], ``seconds`` [T] of training up to each, ``series`` {name: [T]} with None where missing.

        More than ``points`` steps are put into so many buckets: a series is then the mean of each, and ``low`` and ``high`` its range.
        """
        points = min(max(points, 2), MOST_POINTS)
        with self._lock:
            self._read_on()
            count = len(self._steps)
            steps = np.array(self._steps, dtype=np.int64)
            seconds = np.nancumsum(_padded(self._columns.get(STEP_TIME, array("d")), count))
            columns = {name: _padded(self._columns[name], count) for name in names if name in self._columns}
        if since is not None:
            after = steps > since
            steps, seconds = steps[after], seconds[after]
            columns = {name: column[after] for name, column in columns.items()}
        if len(steps) <= points:
            series = {name: _to_list(column) for name, column in columns.items()}
            return {"steps": steps.tolist(), "seconds": _to_list(seconds), "series": series, "low": None, "high": None}
        starts = np.linspace(0, len(steps), points, endpoint=False).astype(np.int64)
        ends = np.append(starts[1:], len(steps)) - 1
        low, mean, high = ({name: part for name, part in parts} for parts in _reduce(columns, starts))
        return {"steps": steps[ends].tolist(), "seconds": _to_list(seconds[ends]), "series": mean, "low": low, "high": high}

    def _read_on(self) -> None:
        """Parse what was added since the last time. Raises ViewError for a line that is not a step."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                identity = (found.st_dev, found.st_ino)
                if identity != self._identity or found.st_size < self._offset:
                    self._forget()
                    self._identity = identity
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            self._forget()
            return
        except OSError as error:
            raise ViewError(f"{self.path.name} cannot be read: {error.strerror}", 422) from None
        whole, newline, _ = content.rpartition(b"\n")
        for line in whole.split(b"\n") if newline else ():
            if line.strip():
                self._add(line)
        self._offset += len(whole) + len(newline)

    def _add(self, line: bytes) -> None:
        try:
            values = json.loads(line)
            step = values.pop("step")
            values.pop("nonfinite", None)  # such a value is null
            if type(step) is not int or abs(step) >= 2**63:
                return
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
        ):  # something else changed the file; the other steps are shown
            return
        if self._steps and step == self._steps[-1]:
            place = len(self._steps) - 1
        else:
            place = len(self._steps)
            self._steps.append(step)
        for name, value in values.items():
            if value is None or (type(value) is int and not is_finite(value)):
                value = math.nan
            elif type(value) is not float and type(value) is not int:
                continue
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = array("d")
            missing = place + 1 - len(column)
            if missing > 0:
                column.extend([np.nan] * missing)
            column[place] = value


def _last_step(lines: Sequence[bytes]) -> int:
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    return 0


def _padded(column: array[float], count: int) -> np.ndarray:
    """Return a column as float64 [count], NaN where it ends early."""
    return np.concatenate([np.array(column, dtype=np.float64), np.full(count - len(column), np.nan)])


def _to_list(column: np.ndarray) -> list[float | None]:
    return [value if ok else None for value, ok in zip(column.tolist(), np.isfinite(column).tolist(), strict=True)]


def _reduce(columns: dict[str, np.ndarray], starts: np.ndarray) -> tuple[list[tuple[str, list[float | None]]], ...]:
    """Return lowest, mean and highest of each bucket, without the values that are not finite."""
    low, mean, high = [], [], []
    for name, column in columns.items():
        finite = np.isfinite(column)
        counts = np.add.reduceat(finite.astype(np.int64), starts)
        sums = np.add.reduceat(np.where(finite, column, 0.0), starts)
        empty = counts == 0
        lowest = np.minimum.reduceat(np.where(finite, column, np.inf), starts)
        highest = np.maximum.reduceat(np.where(finite, column, -np.inf), starts)
        low.append((name, _to_list(np.where(empty, np.nan, lowest))))
        high.append((name, _to_list(np.where(empty, np.nan, highest))))
        mean.append((name, _to_list(np.where(empty, np.nan, sums / np.maximum(counts, 1)))))
    return low, mean, high
