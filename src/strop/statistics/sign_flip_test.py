"""The paired permutation test: the signs of the tasks' differences are flipped at random."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from strop.statistics.student_t import NORMAL

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
