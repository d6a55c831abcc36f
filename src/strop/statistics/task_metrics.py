"""Metrics of a stored task: its value, and how much the value varies with the drawn samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strop.statistics.not_comparable import NotComparable
from strop.statistics.task_results import TaskResult, pass_at_k

StoredTask = Mapping[str, Any]  # with ``environment`` and ``samples``, as written by an evaluation
TRUNCATED = ("length", "context")
SHARE = (0.0, 1.0)
KNOWN = "accuracy, avg@N, pass@K, cons@K, maj@K, reward, avg_length, truncated or errors"


@dataclass(frozen=True)
class TaskMetric:
    """A metric that is a mean over tasks."""

    name: str
    value: Callable[[StoredTask], float]
    noise: Callable[[StoredTask], float | None]  # the variance of the value over other samples of the task; None: unknown
    is_share: bool = False  # between 0 and 1
    higher_is_better: bool | None = True  # None: neither is

    def fit(self, tasks: Sequence[StoredTask]) -> TaskMetric:
        """Return the metric for these tasks: an accuracy that is a score on another scale is not a share."""
        inside = all(SHARE[0] <= self.value(task) <= SHARE[1] for task in tasks)
        return self if inside else replace(self, is_share=False)


def find_task_metric(name: str) -> TaskMetric:
    """Return a metric by name. Raises NotComparable if there is no such mean over tasks."""
    kind, _, number = name.partition("@")
    k = int(number) if number.isdigit() and int(number) > 0 else None
    if kind == "pass" and k is not None:
        return TaskMetric(name, lambda task: _pass(task, k), lambda task: _pass_noise(task, k), is_share=True)
    if kind in ("cons", "maj") and k is not None:
        return TaskMetric(name, lambda task: _vote(task, kind, k), lambda task: None, is_share=True)
    if name == "accuracy" or (kind == "avg" and k is not None):
        return _mean_metric(name, lambda sample: sample["accuracy"], is_share=True, samples=k)
    means: dict[str, TaskMetric] = {
        "reward": _mean_metric("reward", lambda sample: sample["reward"]),
        "avg_length": _mean_metric("avg_length", lambda sample: sample["tokens"], higher_is_better=None),
        "truncated": _mean_metric(
            "truncated", lambda sample: sample["ending"] in TRUNCATED, is_share=True, higher_is_better=False
        ),
        "errors": _mean_metric("errors", lambda sample: sample["error"] is not None, is_share=True, higher_is_better=False),
    }
    if name not in means:
        raise NotComparable(f"{name!r} is not a metric for comparing tasks; choose {KNOWN}")
    return means[name]


def list_task_metrics(tasks: Sequence[StoredTask]) -> list[str]:
    """Return the metrics that these tasks have: pass@k for powers of two up to their smallest number of samples."""
    least = min(len(task["samples"]) for task in tasks)
    names = ["accuracy", *(f"pass@{1 << power}" for power in range(1, least.bit_length()))]
    answered = any(sample["answer"] is not None for task in tasks for sample in task["samples"])
    names += [f"cons@{least}"] if answered and least > 1 else []
    return [*names, "reward", "avg_length", "truncated", "errors"]


def _mean_metric(
    name: str,
    value: Callable[[Mapping[str, Any]], float],
    *,
    is_share: bool = False,
    higher_is_better: bool | None = True,
    samples: int | None = None,
) -> TaskMetric:
    def mean(task: StoredTask) -> float:
        if samples not in (None, len(task["samples"])):
            raise NotComparable(
                f"{name} is a mean of {samples} samples, and task {task['task']!r} has {len(task['samples'])}; choose accuracy"
            )
        values = [float(value(sample)) for sample in task["samples"]]
        return math.fsum(values) / len(values)

    def noise(task: StoredTask) -> float | None:
        values = [float(value(sample)) for sample in task["samples"]]
        if len(values) == 1:
            return None
        center = math.fsum(values) / len(values)
        return math.fsum((each - center) ** 2 for each in values) / (len(values) - 1) / len(values)

    return TaskMetric(name, mean, noise, is_share, higher_is_better)


def _result(task: StoredTask) -> TaskResult:
    samples = task["samples"]
    return TaskResult(
        task["environment"], tuple(sample["accuracy"] for sample in samples), tuple(sample["answer"] for sample in samples)
    )


def _vote(task: StoredTask, kind: str, k: int) -> float:
    if len(task["samples"]) < k:
        raise NotComparable(
            f"{kind}@{k} needs {k} samples, and task {task['task']!r} has {len(task['samples'])}; choose a smaller k"
        )
    return _result(task).consensus(k) if kind == "cons" else _result(task).majority(k)


def _pass(task: StoredTask, k: int) -> float:
    if len(task["samples"]) < k:
        raise NotComparable(
            f"pass@{k} needs {k} samples, and task {task['task']!r} has {len(task['samples'])}; choose a smaller k"
        )
    return pass_at_k(len(task["samples"]), _result(task).correct, k)


def _pass_noise(task: StoredTask, k: int) -> float | None:
    """Return the jackknife variance, leaving out each sample in turn. If all k samples are needed, none can be left out."""
    count, correct = len(task["samples"]), _result(task).correct
    if count <= k:
        return None
    without_correct = pass_at_k(count - 1, correct - 1, k) if correct else 0.0
    without_wrong = pass_at_k(count - 1, correct, k) if correct < count else 0.0
    mean = (correct * without_correct + (count - correct) * without_wrong) / count
    squares = correct * (without_correct - mean) ** 2 + (count - correct) * (without_wrong - mean) ** 2
    return (count - 1) / count * squares
