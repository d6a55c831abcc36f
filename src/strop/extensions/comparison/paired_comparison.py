"""Paired comparisons of tasks: intervals of the difference, the sign-flip permutation test, and what more tasks or samples would show."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from strop.extensions.evaluation.statistics import NORMAL, Interval, confidence_interval, student_t_quantile

FLIPS = 100_000  # random choices, if there are too many distinct sums to count
LARGEST_DENOMINATOR = 20_000  # of means over samples, and of pass@k estimates
LARGEST_GRID = 1 << 17  # possible values of a sum, for the exact test
LARGEST_WORK = 1 << 28
MANY = 1000  # number of equal-sized differences from which their random-sign sum is treated as normal


def sign_flip_p_value(differences: Sequence[float], *, seed: int = 0) -> float:
    """Return the two-sided p-value of differences, one per task or cluster, that are symmetric around 0 under the null
    hypothesis.

    If the two runs were equal, each difference would have either sign with equal probability: the p-value is the share of all
    sign choices whose sum is at least as far from 0. It is exact if the differences are multiples of one number, as for means
    over samples; otherwise it comes from ``FLIPS`` random choices, made repeatable by ``seed``, or from the normal limit for
    very many differences. For differences of -1, 0 and 1 it is McNemar's exact test.
    """
    nonzero = [difference for difference in differences if difference != 0]
    if not nonzero:
        return 1.0
    counts = _to_integers(nonzero)
    if counts is not None:
        return _flip_exactly(counts)
    squares = math.fsum(difference**2 for difference in nonzero)
    if math.fsum(difference**4 for difference in nonzero) < squares * squares / MANY:  # no single difference dominates
        return 2.0 * NORMAL.cdf(-abs(math.fsum(nonzero)) / math.sqrt(squares))
    return _flip_at_random(nonzero, seed)


def adjust_p_values(p_values: Sequence[float]) -> list[float]:
    """Return p-values of several tests corrected by Holm's method: at level 0.05, the probability that any of them errs is 0.05."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min((len(order) - rank) * p_values[index], 1.0))
        adjusted[index] = largest
    return adjusted


def _to_integers(differences: Sequence[float]) -> list[int] | None:
    """Return the differences as multiples of their common unit; None if there is none, or it is too small."""
    fractions = {difference: Fraction(difference).limit_denominator(LARGEST_DENOMINATOR) for difference in set(differences)}
    if any(abs(float(fraction) - difference) > 1e-12 for difference, fraction in fractions.items()):
        return None
    unit = math.lcm(*(fraction.denominator for fraction in fractions.values()))
    if unit > LARGEST_GRID:
        return None
    multiples = {difference: fraction.numerator * (unit // fraction.denominator) for difference, fraction in fractions.items()}
    common = math.gcd(*multiples.values())
    counts = [multiples[difference] // common for difference in differences]
    size = sum(abs(count) for count in counts)
    return counts if size <= LARGEST_GRID and size * len(counts) <= LARGEST_WORK else None


def _flip_exactly(counts: Sequence[int]) -> float:
    """Add the differences one by one to the distribution of their random-sign sum."""
    distribution, reach = np.ones(1), 0  # of the sums from -reach to reach
    for size in map(abs, counts):
        wider = np.zeros(2 * (reach + size) + 1)
        wider[: len(distribution)] += 0.5 * distribution
        wider[2 * size :] += 0.5 * distribution
        distribution, reach = wider, reach + size
    far = abs(sum(counts))
    return min(float(distribution[reach + far :].sum() + distribution[: reach - far + 1].sum()), 1.0) if far else 1.0


def _flip_at_random(differences: Sequence[float], seed: int) -> float:
    values = np.array(differences)
    observed = abs(values.sum()) * (1 - 1e-12)
    random, found, step = np.random.default_rng(seed), 0, max(1, (1 << 22) // len(values))
    for start in range(0, FLIPS, step):
        signs = random.integers(0, 2, size=(min(step, FLIPS - start), len(values)), dtype=np.int8)
        found += int((np.abs((2.0 * signs - 1.0) @ values) >= observed).sum())
    return (found + 1) / (FLIPS + 1)  # the observed signs are one of the choices


POWER = 0.8
PRIOR_PAIRS = 2.0  # as added to paired proportions by Bonett and Price (2012): one pair won by A, one won by B
FEW = 5  # below this many differing tasks, the spread of differences is unknown
SMALL_SAMPLE = 4  # tasks beyond normal theory, for Student's quantiles and the two added pairs
MOST = 10_000_000  # larger forecasts are not given


@dataclass(frozen=True, kw_only=True)
class PairedValues:
    """A metric's value for each task in two evaluations.

    ``a_noise`` and ``b_noise`` are the variances of these values over further samples of the same task, estimated from its
    samples; None with only one sample.
    """

    a: Sequence[float]
    b: Sequence[float]
    a_noise: Sequence[float] | None = None
    b_noise: Sequence[float] | None = None
    bounds: tuple[float, float] | None = None  # of the metric: (0, 1) for shares
    clusters: Sequence[Hashable] | None = None  # of the tasks, if some depend on each other

    @property
    def differences(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.a, self.b, strict=True)]


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """The means of two evaluations, and whether their difference is more than chance."""

    tasks: int
    a: float
    b: float
    a_interval: Interval
    b_interval: Interval
    difference: float  # b - a, paired by task
    interval: Interval  # of the difference
    p_value: float  # of the paired permutation test
    adjusted_p_value: float  # corrected for the number of compared sets
    level: float
    higher: int  # tasks where B is higher
    lower: int
    variance: float  # of a single task's difference
    sampling_variance: float | None  # the part of it that more samples per task would reduce; None: unknown
    more_tasks: int | None  # needed to detect a difference of this size with probability 0.8; None: too many, or it is 0
    more_samples: float | None  # factor on the samples per task for the same; None: no number suffices, or unknown
    detectable: float  # the smallest difference that this many tasks detect with probability 0.8

    @property
    def higher_one(self) -> Literal["a", "b"] | None:
        """Which of the two is higher, if both the test and the interval agree."""
        if self.adjusted_p_value > 1.0 - self.level or 0.0 in self.interval:
            return None
        return "b" if self.difference > 0 else "a"

    def is_equivalent(self, margin: float) -> bool:
        """Whether the difference is smaller than a margin anywhere in the interval."""
        return -margin < self.interval.low and self.interval.high < margin


def compare_paired(values: PairedValues, *, level: float = 0.95, margin: float | None = None) -> PairedComparison:
    """Compare two evaluations on the same tasks. The forecast is for a difference of ``margin``; None: the observed one.

    The interval is a paired t interval whose variance includes two extra pairs, one won by each side with the typical size of a
    difference: without them, intervals would be too narrow for few or no wins. The test is exact (``sign_flip_p_value``).

    Raises ValueError if there are no tasks.
    """
    if not values.a:
        raise ValueError("a comparison needs at least one task")
    differences, count = values.differences, len(values.a)
    totals = _sum_clusters(differences, values.clusters)
    sampling = None
    if values.a_noise is not None and values.b_noise is not None:
        sampling = math.fsum([*values.a_noise, *values.b_noise]) / count
    mean = math.fsum(differences) / count
    spread = _spread(values, mean)
    variance = (
        math.fsum(each * each for each in spread) / (len(spread) - 1) * count / len(spread) if len(spread) > 1 else math.inf
    )
    error = _standard_error(values, spread, mean)
    p_value, sought = sign_flip_p_value(totals), mean if margin is None else margin
    a_interval, b_interval = (
        confidence_interval(side, level=level, bounds=values.bounds, clusters=values.clusters) for side in (values.a, values.b)
    )
    return PairedComparison(
        tasks=count,
        a=math.fsum(values.a) / count,
        b=math.fsum(values.b) / count,
        a_interval=a_interval,
        b_interval=b_interval,
        difference=mean,
        interval=_difference_interval(values, error, mean, len(spread), level),
        p_value=p_value,
        adjusted_p_value=p_value,
        level=level,
        higher=sum(difference > 0 for difference in differences),
        lower=sum(difference < 0 for difference in differences),
        variance=variance,
        sampling_variance=sampling,
        more_tasks=forecast_more_tasks(sought, variance, count, level=level),
        more_samples=forecast_more_samples(sought, variance, sampling, count, level=level),
        detectable=error * math.sqrt(_normal_tasks(1.0, 1.0, level, POWER)),
    )


def forecast_tasks(difference: float, variance: float, *, level: float = 0.95, power: float = POWER) -> float:
    """Return the number of tasks that detect a difference of means with probability ``power``; infinite for a difference of 0.

    ``variance`` is the variance of a single task's difference.
    """
    return _normal_tasks(difference, variance, level, power) + SMALL_SAMPLE


def _normal_tasks(difference: float, variance: float, level: float, power: float) -> float:
    if difference == 0:
        return math.inf
    reach = NORMAL.inv_cdf((1.0 + level) / 2.0) + NORMAL.inv_cdf(power)
    return reach * reach * variance / (difference * difference)


def forecast_more_tasks(
    difference: float, variance: float, tasks: int, *, level: float = 0.95, power: float = POWER
) -> int | None:
    """Return the number of additional tasks needed. None: there is nothing to detect, or too many are needed."""
    fewest = 1 - math.log2(1.0 - level)  # fewest tasks for which the exact test is significant if all differences have one sign
    needed = max(forecast_tasks(difference, variance, level=level, power=power), fewest)
    return max(math.ceil(needed) - tasks, 0) if needed <= MOST else None


def forecast_more_samples(
    difference: float,
    variance: float,
    sampling: float | None,
    tasks: int,
    *,
    level: float = 0.95,
    power: float = POWER,
) -> float | None:
    """Return the factor by which samples per task must grow, at this number of tasks.

    ``sampling`` is the part of the variance that n times as many samples divide by n. None if no number of samples suffices,
    because the tasks themselves differ too much, or if it is unknown.
    """
    if sampling is None or difference == 0 or not math.isfinite(variance):
        return None
    sampling = min(sampling, variance)
    affordable = variance * tasks / max(_normal_tasks(difference, variance, level, power), 1e-300)
    between = variance - sampling
    if affordable >= variance:
        return 1.0
    times = sampling / (affordable - between) if affordable > between else math.inf
    return times if times <= MOST else None


def _spread(values: PairedValues, mean: float) -> list[float]:
    """Return the deviation from the mean of each task's difference, or of each cluster's as if all had equal size."""
    totals = _sum_clusters([difference - mean for difference in values.differences], values.clusters)
    return [total * len(totals) / len(values.a) for total in totals]


def _standard_error(values: PairedValues, spread: Sequence[float], mean: float) -> float:
    """Return the standard error of the mean difference, including the two extra pairs."""
    count = len(spread)
    if count == 1:
        return math.inf
    squares = math.fsum(each * each for each in spread)
    most_common = Counter(round(each, 12) for each in spread).most_common(1)[0][1]
    few = count - most_common < min(FEW, max(count // 2, 1))
    if (few and values.bounds is not None) or squares <= 1e-24 * count:
        of_one = _largest_difference(values) ** 2 if values.bounds is not None or mean == 0 else mean * mean
    else:
        of_one = math.fsum(each**4 for each in spread) / squares  # the mean square of differences, weighted by relevance
    return math.sqrt((squares + PRIOR_PAIRS * of_one) / (count * (count - 1 + PRIOR_PAIRS)))


def _largest_difference(values: PairedValues) -> float:
    """Return the largest possible distance of a task's two values: by the bounds, or the range of all values."""
    pooled = [*values.a, *values.b] if values.bounds is None else list(values.bounds)
    return max(pooled) - min(pooled)


def _difference_interval(values: PairedValues, error: float, mean: float, count: int, level: float) -> Interval:
    reach = math.inf if count == 1 else student_t_quantile((1.0 + level) / 2.0, count - 1) * error
    low, high, largest = mean - reach, mean + reach, _largest_difference(values)
    return Interval(low, high) if values.bounds is None else Interval(max(low, -largest), min(high, largest))


def _sum_clusters(values: Sequence[float], clusters: Sequence[Hashable] | None) -> list[float]:
    if clusters is None:
        return list(values)
    sums: dict[Hashable, list[float]] = defaultdict(list)
    for value, cluster in zip(values, clusters, strict=True):
        sums[cluster].append(value)
    return [math.fsum(each) for each in sums.values()]
