"""What a tracker receives in addition to metrics: tables of samples, histograms, images, checkpoints. Texts are shown verbatim,
never rendered.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
