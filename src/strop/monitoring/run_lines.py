"""Runs as lines of one picture: runs that differ only in their seed share a line, and labels show the differences between lines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Steps = Sequence[tuple[int, Mapping[str, float]]]

LONGEST_LABEL = 48  # characters; longer differences are not used as labels
_NOT_COMPARED = ("logger.", "checkpointing.", "run_name", "watchdog.", "cluster.")  # where a run writes and runs, not what it is
SMOOTH_ABOVE = 12  # series with more points are smoothed


@dataclass(frozen=True)
class LoggedRun:
    """A run's metrics, and its configuration by dotted keys (empty if it has none)."""

    name: str
    steps: Steps
    settings: Mapping[str, Any]

    def series(self, tag: str) -> list[tuple[float, float]]:
        """Return (step, value) of a metric where it is a finite number."""
        return [(float(step), values[tag]) for step, values in self.steps if math.isfinite(values.get(tag, math.nan))]

    @property
    def tags(self) -> set[str]:
        return {tag for _, values in self.steps for tag in values}


@dataclass(frozen=True)
class BandPoint:
    """A step of a line: mean and range over its runs."""

    step: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class RunLine:
    label: str
    runs: tuple[LoggedRun, ...]

    def band(self, tag: str) -> list[BandPoint]:
        """Return a metric over the runs that logged it at each step, each run smoothed first if it is long."""
        values: dict[float, list[float]] = {}
        for run in self.runs:
            points = run.series(tag)
            ys = [y for _, y in points]
            for (x, _), y in zip(points, smooth(ys) if len(ys) > SMOOTH_ABOVE else ys, strict=True):
                values.setdefault(x, []).append(y)
        return [BandPoint(x, sum(ys) / len(ys), min(ys), max(ys)) for x, ys in sorted(values.items())]


def smooth(values: Sequence[float]) -> list[float]:
    """Return the centred moving average over about a tenth of the curve. The window is truncated at both ends."""
    radius = max(1, len(values) // 20)
    windows = [values[max(i - radius, 0) : i + radius + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def make_lines(runs: Sequence[LoggedRun], *, group_by_seed: bool = True) -> list[RunLine]:
    """Return one line for each configuration, or for each run, in the order of the runs."""
    groups: dict[object, list[LoggedRun]] = {}
    for index, run in enumerate(runs):
        compared = tuple(sorted((key, repr(value)) for key, value in run.settings.items() if _is_compared(key)))
        groups.setdefault(compared if group_by_seed and compared else index, []).append(run)
    return [
        RunLine(label, tuple(group)) for label, group in zip(_make_labels(list(groups.values())), groups.values(), strict=True)
    ]


def _is_compared(key: str) -> bool:
    return not key.startswith(_NOT_COMPARED) and not _is_seed(key)


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"


def _make_labels(groups: Sequence[Sequence[LoggedRun]]) -> list[str]:
    """Name each group by the differing settings, or by its runs if that is too long or ambiguous."""
    firsts = [group[0].settings for group in groups]
    known = {key for settings in firsts for key in settings if not key.startswith(_NOT_COMPARED)}
    keys = sorted(known, key=lambda key: (_is_seed(key), key))
    several = any(len(group) > 1 for group in groups)
    differing = [
        key for key in keys if len({repr(settings.get(key)) for settings in firsts}) > 1 and not (several and _is_seed(key))
    ]
    shortened = _shorten_keys(differing)
    labels = [", ".join(f"{shortened[key]}={settings.get(key)}" for key in differing) for settings in firsts]
    usable = all(firsts) and len(set(labels)) == len(labels) and all(0 < len(label) <= LONGEST_LABEL for label in labels)
    if not usable:
        labels = [", ".join(run.name for run in group[:3]) + (", ..." if len(group) > 3 else "") for group in groups]
    return [f"{label} ({len(group)} seeds)" if len(group) > 1 else label for label, group in zip(labels, groups, strict=True)]


def _shorten_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest ends of the keys that tell them apart."""
    endings = Counter(ending for key in keys for ending in _list_endings(key))
    return {key: next((ending for ending in _list_endings(key) if endings[ending] == 1), key) for key in keys}


def _list_endings(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))


def flatten_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten_settings(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
