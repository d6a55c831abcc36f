"""Student's t distribution, whose quantiles the intervals need, without a dependency on SciPy."""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

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
