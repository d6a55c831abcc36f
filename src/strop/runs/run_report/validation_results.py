"""The validations of a run: each with its confidence interval, and the last one compared with the first on the same tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.monitoring.rollout_store.validation_samples import VALIDATION_FOLDER, ValidationSamples
from strop.statistics.evaluation_comparison import Comparison, compare_evaluations
from strop.statistics.intervals import Interval, confidence_interval
from strop.statistics.task_metrics import find_task_metric

MOST_VALIDATIONS = 60  # read; of more, evenly spaced ones


@dataclass(frozen=True, kw_only=True)
class ValidationPoint:
    """The mean over the tasks of one validation."""

    step: int
    mean: float
    interval: Interval  # 95 %
    tasks: int
    samples: str  # of each task


@dataclass(frozen=True, kw_only=True)
class ValidationResults:
    """What the stored validations say of one metric of the tasks."""

    metric: str
    is_share: bool
    points: tuple[ValidationPoint, ...]
    comparison: Comparison | None  # of the last with the first
    left_out: int  # validations that were not read

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(point.step for point in self.points)


def read_validation_tasks(folder: Path, step: int) -> list[Mapping[str, Any]]:
    """Return the tasks of a validation with their samples. Raises OSError, and ValueError if the file is none."""
    content = json.loads((folder / VALIDATION_FOLDER / f"step_{step:06d}.json").read_text(encoding="utf-8"))
    tasks = content.get("tasks") if isinstance(content, Mapping) else None
    if not isinstance(tasks, list):
        raise ValueError(f"step {step} has no list of tasks")
    return [task for task in tasks if isinstance(task, Mapping) and task.get("samples")]


def read_validations(folder: Path, metric: str = "accuracy") -> ValidationResults | None:
    """Read the validations of a run; None if it has stored none with samples. One that cannot be read is left out, and counted."""
    steps = ValidationSamples(folder).steps() if (folder / VALIDATION_FOLDER).is_dir() else []
    chosen = _spread(steps, MOST_VALIDATIONS)
    read: dict[int, list[Mapping[str, Any]]] = {}
    points, is_share = [], True
    for step in chosen:
        try:
            tasks = read_validation_tasks(folder, step)
            fitted = find_task_metric(metric).fit(tasks)
            values = [float(fitted.value(task)) for task in tasks]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if not values:
            continue
        is_share = is_share and fitted.is_share
        interval = confidence_interval(values, bounds=(0.0, 1.0) if fitted.is_share else None)
        points.append(
            ValidationPoint(
                step=step, mean=sum(values) / len(values), interval=interval, tasks=len(values), samples=_count_samples(tasks)
            )
        )
        if len(points) == 1 or step == chosen[-1]:
            read[step] = tasks  # of the others nothing is kept
    if not points:
        return None
    return ValidationResults(
        metric=metric,
        is_share=is_share,
        points=tuple(points),
        comparison=_compare(read, metric),
        left_out=len(steps) - len(points),
    )


def _compare(read: Mapping[int, Sequence[Mapping[str, Any]]], metric: str) -> Comparison | None:
    if len(read) < 2:
        return None
    try:
        return compare_evaluations(read[min(read)], read[max(read)], metric=metric)
    except (ValueError, KeyError, TypeError):  # other tasks, or of another version
        return None


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """Return at most so many of the steps, evenly spaced, with the first and the last."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]


def _count_samples(tasks: Sequence[Mapping[str, Any]]) -> str:
    counts = {len(task["samples"]) for task in tasks}
    return str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
