"""Pearson's chi-square without scipy."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chi_square(counts: Tensor, probabilities: Tensor, *, least_expected: float = 5.0) -> tuple[float, int]:
    """The statistic and its degrees of freedom; cells expected less than ``least_expected`` times are merged into one."""
    expected = probabilities.double() * counts.sum()
    order = expected.argsort()
    expected, observed = expected[order], counts.double()[order]
    small = int((expected.cumsum(0) < least_expected).sum()) + 1
    small = max(small, int((expected < least_expected).sum()))
    expected = torch.cat([expected[:small].sum()[None], expected[small:]])
    observed = torch.cat([observed[:small].sum()[None], observed[small:]])
    return float(((observed - expected).square() / expected).sum()), len(expected) - 1


def chi_square_limit(freedom: int, deviations: float = 4.5) -> float:
    """What the statistic exceeds as often as a normal variable exceeds ``deviations`` (3e-6 at 4.5), by Wilson and Hilferty."""
    if freedom == 0:
        return 1e-9
    scale = 2 / (9 * freedom)
    return freedom * (1 - scale + deviations * math.sqrt(scale)) ** 3


def fits(counts: Tensor, probabilities: Tensor) -> bool:
    """Whether draws of these counts may come from these probabilities; nothing of probability 0 may have been drawn."""
    if bool((counts[probabilities == 0] > 0).any()):
        return False
    possible = probabilities > 0
    statistic, freedom = chi_square(counts[possible], probabilities[possible])
    return statistic <= chi_square_limit(freedom)
