"""One run as the view reads it: each of its files when it is asked for, and again when it changed."""

from __future__ import annotations

import json
import math
import os
import shlex
import threading
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from strop.extensions.reading.doctor import ALIVE, find_verdict
from strop.extensions.view.config_defaults import find_changed, flatten
from strop.extensions.view.rollout_index import RolloutIndex
from strop.extensions.watch.timeline_file import TIMELINE_FILE, read_timeline
from strop.monitoring.rollout_store.rollout_store import ROLLOUTS_FOLDER
from strop.monitoring.rollout_store.stored_images import StoredImages
from strop.monitoring.rollout_store.validation_samples import ValidationSamples
from strop.monitoring.run_starts import HISTORY_FILE, read_finish
from strop.monitoring.trackers.jsonl import METRICS_FILE
from strop.monitoring.waits import Status, read_status
from strop.safety.printable import make_printable, redact_arguments, redact_secrets, redact_yaml
from strop.sampling import is_finite
from strop.storage.files import clean_json


class ViewError(Exception):
    """A request that cannot be answered. The message is shown on the page."""

    def __init__(self, message: str, status: int = 404) -> None:
        super().__init__(message)
        self.status = status


def clean_number(value: Any) -> float | None:
    """Return a finite number, or None: JSON has no others."""
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


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
        """Return the last logged step, read only from the end of the file; 0 if there is none."""
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

    def rows(self, wanted: Callable[[str], bool], after: int) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield (step, metrics) of the steps after one, with the wanted metrics that are finite."""
        with self._lock:
            self._read_on()
            first = bisect_right(self._steps, after)
            steps = self._steps[first:].tolist()
            columns = {name: column[first:].tolist() for name, column in self._columns.items() if wanted(name)}
        for place, step in enumerate(steps):
            values = ((name, column[place]) for name, column in columns.items() if place < len(column))
            yield step, {name: value for name, value in values if math.isfinite(value)}

    def series(self, names: Sequence[str], since: int | None, points: int) -> dict[str, Any]:
        """Return metrics by step: ``steps`` [T], ``seconds`` [T] of training up to each, ``series`` {name: [T]} with None where missing.

        More than ``points`` steps are put into ``points`` buckets: a series is then the mean of each, and ``low`` and ``high`` its range.
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


CONFIG_FILE = "config.yaml"
KINDS = ("grpo", "ppo", "sft", "dpo", "rm", "distillation")  # sections of a configuration, and commands
IMAGE_TYPES = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"RIFF", "image/webp"))
LARGEST_REPLAY = 64 * 2**20  # bytes
MOST_TIMELINES = 8  # steps at once
RECENT_SECONDS = 60.0  # a run without status.json that wrote metrics so recently counts as live


class ViewedRun:
    """A log folder."""

    def __init__(self, id: str, folder: Path, parse_yaml: Callable[[str], Any]) -> None:
        self.id, self.folder = id, folder
        self._parse_yaml = parse_yaml
        self._config: tuple[tuple[int, ...], Mapping[str, Any]] = ((), {})
        self.metrics = MetricHistory(folder / METRICS_FILE)
        self.rollouts = RolloutIndex(folder)

    @cached_property
    def name(self) -> str:
        parent = self.folder.parent.name
        return f"{parent}/{self.folder.name}" if self.folder.name in ("logs", "log") and parent else self.folder.name

    @property
    def updated(self) -> float | None:
        """When the run wrote last (Unix time)."""
        times = [when for name in (METRICS_FILE, "status.json", CONFIG_FILE) if (when := _changed(self.folder / name))]
        return max(times, default=None)

    def validation(self) -> ValidationSamples:
        return ValidationSamples(self.folder)

    def validation_steps(self) -> list[int]:
        return self.validation().steps() if (self.folder / "validation").is_dir() else []

    def status(self) -> Status | None:
        """Read status.json; None if there is none. Raises ViewError for a file of another version or a half-written one."""
        try:
            return read_status(self.folder)
        except (ValueError, OSError, AttributeError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ViewError(f"status.json cannot be read: {str(error)[:300]}", 422) from None

    def is_live(self) -> bool:
        try:
            status = self.status()
        except ViewError:
            status = None
        if status is not None:
            return find_verdict(status)[0] in ALIVE
        changed = _changed(self.folder / METRICS_FILE)
        return changed is not None and time.time() - changed < RECENT_SECONDS and read_finish(self.folder) is None

    def config(self) -> Mapping[str, Any]:
        """Return the configuration as nested dicts, without secrets; empty if there is none. Raises ViewError."""
        files = [self.folder / HISTORY_FILE, self.folder / CONFIG_FILE]
        stamp = tuple(int((_changed(file) or 0) * 1e6) for file in files)
        if self._config[0] != stamp:
            self._config = (stamp, redact_secrets(self._read_config()))
        return self._config[1]

    def _read_config(self) -> Mapping[str, Any]:
        recorded = _read_history(self.folder / HISTORY_FILE)
        if recorded is not None:  # JSON is read a hundred times as fast as YAML
            return recorded
        try:
            values = self._parse_yaml((self.folder / CONFIG_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except Exception as error:  # YAML readers raise their own classes
            raise ViewError(f"{CONFIG_FILE} cannot be read: {str(error)[:300]}", 422) from None
        return values if isinstance(values, dict) else {}

    def config_text(self) -> str:
        """Return config.yaml, without secrets."""
        try:
            text = (self.folder / CONFIG_FILE).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return redact_yaml(text)

    def describe_config(self) -> dict[str, Any]:
        """Return config.yaml, the settings by key, and those that differ from their defaults, without secrets. Raises ViewError."""
        values = clean_json(dict(flatten(self.config())))
        return {"text": make_printable(self.config_text()), "values": values, "changed": find_changed(values, self.kind())}

    def replays(self) -> list[dict[str, Any]]:
        """Return the stored results of ``strop replay``; a file that is half-written is left out."""
        found = []
        for path in sorted((self.folder / "replays").glob("*.json")):
            try:
                if path.is_file() and path.stat().st_size <= LARGEST_REPLAY:
                    values = json.loads(path.read_text(encoding="utf-8"))
                    found.append({"file": path.name, **clean_json(values if isinstance(values, dict) else {"result": values})})
            except (OSError, ValueError):
                continue
        return found

    def timeline(self, until: int | None, count: int) -> dict[str, Any]:
        """Return up to ``MOST_TIMELINES`` steps of the time line of samples. Raises ViewError."""
        try:
            found = read_timeline(self.folder / TIMELINE_FILE, until, min(max(count, 1), MOST_TIMELINES))
        except FileNotFoundError:
            raise ViewError(
                "this run has no time line of its samples: it has not finished a step, or is of recorded data"
            ) from None
        except ValueError as error:
            raise ViewError(f"{TIMELINE_FILE} cannot be read: {str(error)[:300]}", 422) from None
        return dict(clean_json(found))

    def image(self, name: str) -> tuple[bytes, str]:
        """Return the content and the type of a stored image. Raises ViewError."""
        if not (name.isascii() and name.isalnum()):
            raise ViewError("an image is named by letters and digits", 400)
        for folder in (self.folder / ROLLOUTS_FOLDER, self.validation().folder):
            path = StoredImages(folder).find(name)
            if path is not None and path.resolve().is_relative_to(self.folder.resolve()):  # not a link out of the run
                content = path.read_bytes()
                kind = next((kind for start, kind in IMAGE_TYPES if content.startswith(start)), None)
                if kind is None or (kind == "image/webp" and content[8:12] != b"WEBP"):
                    raise ViewError("this image is not PNG, JPEG or WebP, and is not shown", 415)
                return content, kind
        raise ViewError(f"the image {name[:80]} is not stored")

    def kind(self) -> str:
        """Return the command that the run was started with: grpo, sft, ..."""
        config = self._config_or_nothing()
        return next((kind for kind in KINDS if isinstance(config.get(kind), dict)), "")

    def describe(self) -> dict[str, Any]:
        """Return what the list of runs says of it."""
        config, kind = self._config_or_nothing(), self.kind()
        steps = self.rollouts.steps()
        try:
            status = self.status()
        except ViewError:
            status = None
        section = config.get(kind) or {}
        return {
            "id": self.id,
            "name": str(config.get("run_name") or self.name),
            "folder": str(self.folder),
            "kind": kind,
            "algorithm": _find(config, "algorithm", "name") or kind,
            "model": _find(config, "policy", "model_name"),
            "seed": section.get("seed"),
            "live": self.is_live(),
            "state": None if status is None else find_verdict(status)[0],
            "step": max(self.metrics.last_step_on_disk(), 0 if status is None else status.step),
            "max_steps": section.get("max_num_steps"),
            "started": None if status is None else status.started,
            "updated": self.updated,
            "has_rollouts": bool(steps),
            "steps_with_rollouts": [steps[0], steps[-1], len(steps)] if steps else None,
            "validations": self.validation_steps(),
        }

    def describe_unread(self, error: Exception) -> dict[str, Any]:
        """Return what the list of runs says of one whose files cannot be read."""
        nothing = dict.fromkeys(("kind", "algorithm"), "") | dict.fromkeys(
            ("model", "seed", "max_steps", "started", "steps_with_rollouts")
        )
        why = f"unreadable ({type(error).__name__}: {str(error)[:200]})"
        about = {"id": self.id, "name": self.name, "folder": str(self.folder), "live": False, "state": why, "step": 0}
        return {**nothing, **about, "updated": self.updated, "has_rollouts": False, "validations": []}

    def _config_or_nothing(self) -> Mapping[str, Any]:
        try:
            return self.config()
        except ViewError:
            return {}


def _find(values: Mapping[str, Any], *path: str) -> Any:
    found: Any = values
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _read_history(path: Path) -> dict[str, Any] | None:
    """Return the settings that held last, from the history of the configuration; None without one."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        config: dict[str, Any] = lines[0]["config"]
        for line in lines[1:]:
            for key, (_, new) in (line.get("changed") or {}).items():
                _set(config, key.split("."), new)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def _set(values: dict[str, Any], path: list[str], new: Any) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
    values[path[-1]] = new


def hide_secret_words(command: str) -> str:
    """Return a command without secrets."""
    try:
        return shlex.join(redact_arguments(shlex.split(command)))
    except ValueError:
        return command
