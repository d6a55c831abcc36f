"""The tracker interface, and a composite tracker in which a failing tracker cannot stop the run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from strop.monitoring.logger_config import LoggerConfig
from strop.safety.printable import make_printable
from strop.storage.files import is_out_of_space

LONGEST = 300  # characters


def describe_error(error: BaseException) -> str:
    """Return ``ConnectionError: the first line of the message``, without further lines (an SQL statement, an HTML page)."""
    lines = [line.strip() for line in make_printable(str(error)).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


LARGEST = 1e150  # of a histogram value, so that bin widths do not overflow


@dataclass(frozen=True, kw_only=True)
class SampleRow:
    """One rollout of a table. Texts are printable: control characters are escaped."""

    environment: str
    task: str
    prompt: str
    completion: str
    answer: str
    reward: float
    ending: str


@dataclass(frozen=True, kw_only=True)
class SampleTable:
    """Rollouts of a step: ``samples/train`` or ``samples/validation``."""

    COLUMNS = ("environment", "task", "prompt", "completion", "answer", "reward", "ending")

    name: str
    rows: tuple[SampleRow, ...]

    def values(self) -> list[list[str | float]]:
        """Return the rows as lists, in the order of ``COLUMNS``."""
        return [[getattr(row, column) for column in self.COLUMNS] for row in self.rows]

    def as_text(self) -> str:
        """Return the rows as plain text, for services without tables."""
        parts = []
        for row in self.rows:
            head = f"[{row.environment}] {row.task}: reward {row.reward:.4g}, {row.ending}"
            parts.append("\n".join((head, "--- prompt", row.prompt, "--- completion", row.completion, "--- answer", row.answer)))
        return "\n\n".join(parts)


@dataclass(frozen=True, kw_only=True)
class MetricHistogram:
    """The distribution of a step's values: ``histograms/reward``."""

    name: str
    values: tuple[float, ...]

    def count(self, most: int = 30) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Return the middles of at most ``most`` bins of equal width, and how many values are in each.

        A few distinct values, such as rewards of 0 and 1, become the middles of their bins.
        """
        import numpy as np

        found = np.clip(np.asarray(self.values, dtype=np.float64), -LARGEST, LARGEST)
        distinct = np.unique(found)
        low, high = float(distinct[0]), float(distinct[-1])
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            return (low,), (len(found),)
        gaps = (high - low) / float(np.diff(distinct).min())
        if gaps < most:
            bins = round(gaps) + 1
            half = (high - low) / (bins - 1) / 2
            low, high = low - half, high + half
        else:
            bins = most
        counts, edges = np.histogram(found, bins=bins, range=(low, high))
        return tuple(((edges[:-1] + edges[1:]) / 2).tolist()), tuple(counts.tolist())

    def quantiles(self) -> dict[str, float]:
        """Return NAME/p0, p10, p50, p90, p100, for services without histograms."""
        ordered = sorted(self.values)
        return {f"{self.name}/p{share}": ordered[round(share / 100 * (len(ordered) - 1))] for share in (0, 10, 50, 90, 100)}


@dataclass(frozen=True, kw_only=True)
class SampleImage:
    """An image shown in a rollout."""

    name: str
    caption: str
    path: Path  # a file in the log folder


@dataclass(frozen=True, kw_only=True)
class StepMedia:
    """Media of a step."""

    tables: tuple[SampleTable, ...] = ()
    histograms: tuple[MetricHistogram, ...] = ()
    images: tuple[SampleImage, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that is complete on disk."""

    step: int
    folder: Path


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Arguments for creating a tracker. An entry point of the group ``strop.trackers`` is a function of this that returns a
    Tracker.
    """

    logger: LoggerConfig
    name: str | None  # run_name
    folder: Path  # the run's log folder
    settings: Mapping[str, Any]  # the whole configuration, without secrets


def name_project(configured: str | None, variable: str) -> str:
    return configured or os.environ.get(variable) or "strop"


class Tracker(Protocol):
    """Receives the metrics and messages of a run.

    The order of calls is: ``resume`` at most once, then any number of ``log``, ``log_media``, ``log_checkpoint``, ``note`` and
    ``progress``, then ``close``. Steps ascend; a step's media come before its metrics. Step 0 is the model before training; its metrics
    are those of a validation. Logging the same step again adds metrics and overwrites those of the same name.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a finished step. A tracker that writes files has them on disk when this returns."""

    def log_media(self, step: int, media: StepMedia) -> None:
        """Show samples, histograms and images of a step."""

    def log_checkpoint(self, saved: SavedCheckpoint) -> None:
        """Record that a checkpoint is on disk."""

    def note(self, text: str) -> None:
        """Show a message to the user: a checkpoint was saved, a fallback was taken, training has finished."""

    def progress(self, text: str) -> None:
        """Show the current activity in a few words. Replaces the previous one and is never recorded."""

    def resume(self, step: int) -> None:
        """Continue after ``step``: discard the records of later steps, which will run again.

        -1 means that a new run starts from scratch in this log folder.
        """

    def close(self) -> None:
        """Release resources. May be called twice."""


class NullTracker:
    """A tracker that does nothing. Inherit from it to implement only some of the methods."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def log_media(self, step: int, media: StepMedia) -> None:
        pass

    def log_checkpoint(self, saved: SavedCheckpoint) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def progress(self, text: str) -> None:
        pass

    def resume(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class CompositeTracker:
    """Combines several trackers. A tracker that raises is disabled with one warning, and the run continues.

    A full disk does not disable a tracker: it causes a warning, and the tracker is called again.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._active = tuple(trackers)
        self._failures: list[str] = []
        self._refused: set[int] = set()  # ids of trackers whose last call was refused by the file system

    @property
    def failures(self) -> list[str]:
        """What was not recorded because a tracker failed, one message each."""
        return [*self._failures, *self._inner_failures()]

    def _inner_failures(self) -> list[str]:
        return [failure for tracker in self._active for failure in getattr(tracker, "failures", ())]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call_each(lambda tracker: tracker.log(step, metrics))

    def log_media(self, step: int, media: StepMedia) -> None:
        self._call_each(lambda tracker: tracker.log_media(step, media) if hasattr(tracker, "log_media") else None)

    def log_checkpoint(self, saved: SavedCheckpoint) -> None:
        self._call_each(lambda tracker: tracker.log_checkpoint(saved) if hasattr(tracker, "log_checkpoint") else None)

    def note(self, text: str) -> None:
        self._call_each(lambda tracker: tracker.note(text))

    def progress(self, text: str) -> None:
        self._call_each(lambda tracker: tracker.progress(text))

    def resume(self, step: int) -> None:
        self._call_each(lambda tracker: tracker.resume(step))

    def close(self) -> None:
        self._call_each(lambda tracker: tracker.close())
        self._failures += self._inner_failures()
        self._active = ()

    def _call_each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in self._active:
            try:
                call(tracker)
            except Exception as error:  # KeyboardInterrupt and SystemExit are not Exceptions and propagate
                if is_out_of_space(error):
                    self._warn_of_refusal(tracker, error)
                else:
                    self._disable(tracker, error)
            else:
                self._refused.discard(id(tracker))

    def _warn_of_refusal(self, tracker: Tracker, error: Exception) -> None:
        if id(tracker) not in self._refused:
            self._refused.add(id(tracker))
            logger.warning(
                "%s could not write and is tried again at the next step: %s", type(tracker).__name__, describe_error(error)
            )

    def _disable(self, tracker: Tracker, error: Exception) -> None:
        self._active = tuple(other for other in self._active if other is not tracker)
        name = type(tracker).__name__
        self._failures.append(f"{name} failed and was off for the rest of this run: {describe_error(error)}")
        logger.warning("%s failed and is off for the rest of this run: %s", name, describe_error(error))
        logger.debug("traceback of %s", name, exc_info=error)
