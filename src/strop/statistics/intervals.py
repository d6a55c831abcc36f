"""Uncertainty of estimates: standard errors and confidence intervals of means over tasks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from strop.statistics.student_t import NORMAL, student_t_quantile

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
