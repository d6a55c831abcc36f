"""Intervals of means over tasks (Student's t), and the metrics that are means over tasks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import Any

from strop.statistics import TaskResult, pass_at_k, present_tasks

NORMAL = NormalDist()
_TERMS, _PRECISION = 500, 1e-15


@cache
def student_t_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of a t distribution with ``freedom`` degrees of freedom."""
    if probability == 0.5:
        return 0.0
    if probability < 0.5:
        return -student_t_quantile(1.0 - probability, freedom)
    low, high = 0.0, 1.0
    while student_t_cdf(high, freedom) < probability:
        low, high = high, 2.0 * high
    while (middle := (low + high) / 2.0) not in (low, high):
        low, high = (middle, high) if student_t_cdf(middle, freedom) < probability else (low, middle)
    return high


def student_t_cdf(value: float, freedom: float) -> float:
    """Return the probability that a t-distributed variable with ``freedom`` degrees of freedom is at most ``value``."""
    if math.isinf(freedom):
        return NORMAL.cdf(value)
    tail = 0.5 * regularized_beta(freedom / (freedom + value * value), freedom / 2.0, 0.5)
    return 1.0 - tail if value > 0 else tail


def regularized_beta(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b): the distribution function of a beta(a, b) variable."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1.0) / (a + b + 2.0):  # the continued fraction of the other tail converges faster here
        return 1.0 - regularized_beta(1.0 - x, b, a)
    scale = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    return scale * _beta_fraction(x, a, b)


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Return the continued fraction of I_x(a, b) (Abramowitz and Stegun 26.5.8), by the modified Lentz method."""
    numerator, denominator = 1.0, 1.0 / _nonzero(1.0 - (a + b) * x / (a + 1.0))
    result = denominator
    for m in range(1, _TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0))
        factor = 1.0
        for term in (even, odd):
            denominator = 1.0 / _nonzero(1.0 + term * denominator)
            numerator = _nonzero(1.0 + term / numerator)
            factor = numerator * denominator
            result *= factor
        if abs(factor - 1.0) < _PRECISION:
            break
    return result


def _nonzero(value: float) -> float:
    return value if abs(value) > 1e-300 else 1e-300


# Number of prior tasks assumed to vary like 0/1 outcomes, the maximum: without it a few equal tasks near a bound would give
# intervals of zero width.
PRIOR_TASKS = 1.0


@dataclass(frozen=True)
class Interval:
    """A range that contains the true value of an estimate with a given probability."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def is_bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


def standard_error(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> float:
    """Return the standard error of the mean of at least two values.

    The values are independent or, with ``clusters`` (the cluster name of each value, for example the passage of a question), only
    between clusters.
    """
    mean = math.fsum(values) / len(values)
    sums = _sum_clusters([value - mean for value in values], clusters)
    return math.sqrt(math.fsum(each * each for each in sums) * len(sums) / (len(sums) - 1)) / len(values)


def confidence_interval(
    values: Sequence[float],
    *,
    level: float = 0.95,
    bounds: tuple[float, float] | None = None,
    clusters: Sequence[Hashable] | None = None,
) -> Interval:
    """Return the confidence interval of a mean over tasks.

    For accuracies, pass@k and other shares, give the ``bounds`` (0, 1): the interval then stays inside, and has a width even if
    all values are equal. It is Wilson's where each value is 0 or 1. Other bounded means use Wilson's with an effective number of
    tasks: the number of 0/1 outcomes with the same variance, and Student's t quantile. Without bounds it is the t interval, and
    infinite for a single value.

    Args:
        values: One for each task: the mean over its samples.
        level: The probability that the interval holds the true mean.
        bounds: The smallest and the largest possible value, if any.
        clusters: The cluster of each value, if values of one cluster depend on each other.

    Raises ValueError if there are no values, or one is out of bounds.
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    mean = math.fsum(values) / len(values)
    count = len(values) if clusters is None else len(set(clusters))
    if bounds is not None:
        return _score_interval(values, mean, count, level, bounds, clusters)
    if count == 1:
        return Interval(-math.inf, math.inf)
    reach = student_t_quantile((1.0 + level) / 2.0, count - 1) * standard_error(values, clusters)
    return Interval(mean - reach, mean + reach)


def _score_interval(
    values: Sequence[float],
    mean: float,
    count: int,
    level: float,
    bounds: tuple[float, float],
    clusters: Sequence[Hashable] | None,
) -> Interval:
    low, high = bounds
    if not all(low <= value <= high for value in values):
        raise ValueError(f"found values from {min(values)} to {max(values)}, outside of the bounds {low} and {high}")
    share = min(max((mean - low) / (high - low), 0.0), 1.0)
    quantile = NORMAL.inv_cdf((1.0 + level) / 2.0)
    size = float(count)
    binary = clusters is None and all(value in bounds for value in values)
    if not binary and count > 1 and 0.0 < share < 1.0:
        largest = (high - low) ** 2 * share * (1.0 - share) / (count - 1)  # the squared error of outcomes at the bounds
        effect = standard_error(values, clusters) ** 2 / largest
        effect = ((count - 1) * effect + PRIOR_TASKS) / (count - 1 + PRIOR_TASKS)
        size = count / effect * (quantile / student_t_quantile((1.0 + level) / 2.0, count - 1)) ** 2
    square = quantile * quantile / size
    center = (share + square / 2.0) / (1.0 + square)
    reach = math.sqrt(square * (share * (1.0 - share) + square / 4.0)) / (1.0 + square)
    ends = (0.0 if share == 0.0 else max(center - reach, 0.0), 1.0 if share == 1.0 else min(center + reach, 1.0))
    return Interval(low + (high - low) * ends[0], low + (high - low) * ends[1])


def _sum_clusters(values: Sequence[float], clusters: Sequence[Hashable] | None) -> list[float]:
    if clusters is None:
        return list(values)
    sums: dict[Hashable, float] = defaultdict(float)
    for value, cluster in zip(values, clusters, strict=True):
        sums[cluster] += value
    return list(sums.values())


class NotComparable(ValueError):
    """Two evaluations cannot be compared. The message says why, and what to do."""


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


def find_accuracy_interval(tasks: Sequence[StoredTask]) -> tuple[float, float, int] | None:
    """Return the ends of the 95 % interval of the accuracy, and the number of tasks; None without any. Raises NotComparable."""
    present = present_tasks(tasks)
    metric = find_task_metric("accuracy").fit(present)
    values = [float(metric.value(task)) for task in present]
    if not values:
        return None
    interval = confidence_interval(values, bounds=SHARE if metric.is_share else None)
    return interval.low, interval.high, len(values)
