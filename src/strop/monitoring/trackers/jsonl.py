"""``metrics.jsonl``: one JSON object per step, with the key ``step``.

    {"step": 12, "train/reward": 0.53, "train/loss": null, "nonfinite": {"train/loss": "nan"}}

JSON has no NaN or infinity: such a value is written as null, and ``nonfinite`` names it. A line is on disk (fsync) when
``log`` returns. Logging a step again merges the keys into one object and rewrites the file atomically. That copies the file,
so log a step in a single call where possible. If the disk is full, steps wait in memory and are written, in order, when there is room.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from strop.monitoring.trackers.base import NullTracker
from strop.storage.files import atomic_write, find_refusal, format_bytes, free_bytes

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
MOST_WAITING = 10_000  # steps held in memory while the disk is full


class MalformedMetrics(ValueError):
    """A line of metrics.jsonl is not a step. The message says which line and what to do."""


class JsonlTracker(NullTracker):
    """Writes ``<log_dir>/metrics.jsonl``. Opening it removes a last line that a kill truncated."""

    def __init__(self, log_dir: Path) -> None:
        self.path = Path(log_dir).absolute() / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _repair(self.path)
        self._last_step = _find_last_step(self.path)
        self._waiting: dict[int, Mapping[str, float]] = {}  # steps that are not in the file yet
        self._refused = False  # the last write was
        self._file: int | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        newest = max(self._waiting, default=self._last_step)
        if newest is not None and step < newest:
            raise ValueError(
                f"step {step} was logged after step {newest}, which is already in {self.path}; a run that continues from an earlier step "
                f"must call resume({step - 1}) first, and a new run needs its own log folder"
            )
        encode_line(step, metrics)  # raises before anything is stored
        self._waiting[step] = {**self._waiting.get(step, {}), **metrics}
        self._write_waiting()

    def resume(self, step: int) -> None:
        self._waiting = {waiting: metrics for waiting, metrics in self._waiting.items() if waiting <= step}
        lines = {logged_step: line for logged_step, line in _read_lines(self.path) if logged_step <= step}
        self._replace(list(lines.values()))
        self._last_step = max(lines, default=None)
        self._write_waiting()
        first = max([*lines, *self._waiting, 0]) + 1
        if first < step:  # a run killed between saving a step and logging it lacks only that step
            log.warning(
                "%s has no steps %d to %d, and the run continues after step %d: it was removed or changed, or belongs to another "
                "checkpointing.checkpoint_dir; these steps stay missing",
                self.path,
                first,
                step - 1,
                step,
            )

    def close(self) -> None:
        self._write_waiting()
        if self._waiting:
            log.warning("%s lacks the steps %s: they could not be written", self.path, ", ".join(map(str, self._waiting)))
            self._waiting.clear()
        self._close_file()

    def _write_waiting(self) -> None:
        """Write the waiting steps, in order; keep them if the file system refuses."""
        count = len(self._waiting)
        for step in sorted(self._waiting):
            try:
                self._write(step, self._waiting[step])
            except OSError as error:
                self._close_file()
                reason = find_refusal(error, self.path.parent)
                if reason is None:
                    raise
                self._keep_waiting(reason)
                return
            del self._waiting[step]
            self._last_step = step
        if self._refused and count:
            self._refused = False
            log.warning("%s is written again: %d steps that had to wait are in it", self.path, count)

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._last_step and self.path.exists():
            self._merge(step, metrics)
        else:
            self._append(encode_line(step, metrics))

    def _keep_waiting(self, reason: str) -> None:
        if not self._refused:
            free = format_bytes(free_bytes(self.path.parent))
            log.warning("%s cannot be written: %s (%s free). Metrics wait in memory until there is room", self.path, reason, free)
        self._refused = True
        while len(self._waiting) > MOST_WAITING:
            oldest = min(self._waiting)
            del self._waiting[oldest]
            log.warning("%s: more than %d steps wait for room; the metrics of step %d are lost", self.path, MOST_WAITING, oldest)

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, line: str) -> None:
        """Append a line completely, or nothing if this raises."""
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            self._close_file()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            log.warning(
                "%s was deleted while the run writes it: it starts again, and the steps before are lost. A reward, an environment or "
                "another program did that",
                self.path,
            )
        if self._file is None:
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        before, rest = os.fstat(self._file).st_size, memoryview((line + "\n").encode())
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, before)
            raise

    def _merge(self, step: int, metrics: Mapping[str, float]) -> None:
        lines = list(_read_lines(self.path))
        previous = decode_line(lines[-1][1])[1]
        self._replace([line for _, line in lines[:-1]] + [encode_line(step, {**previous, **metrics})])

    def _replace(self, lines: list[str]) -> None:
        self._close_file()  # after the rename, the open file would be the old one
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
