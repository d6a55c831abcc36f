"""Pearson's chi-square test without SciPy."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chi_square(counts: Tensor, probabilities: Tensor, *, min_expected: float = 5.0) -> tuple[float, int]:
    """Return the statistic and its degrees of freedom. Cells with expected counts below ``least_expected`` are merged into one."""
    expected = probabilities.double() * counts.sum()
    order = expected.argsort()
    expected, observed = expected[order], counts.double()[order]
    small = int((expected.cumsum(0) < min_expected).sum()) + 1
    small = max(small, int((expected < min_expected).sum()))
    expected = torch.cat([expected[:small].sum()[None], expected[small:]])
    observed = torch.cat([observed[:small].sum()[None], observed[small:]])
    return float(((observed - expected).square() / expected).sum()), len(expected) - 1


def chi_square_limit(freedom: int, deviations: float = 4.5) -> float:
    """Return the critical value at the tail probability of ``deviations`` normal standard deviations (3e-6 at 4.5), by Wilson-Hilferty."""
    if freedom == 0:
        return 1e-9
    scale = 2 / (9 * freedom)
    return freedom * (1 - scale + deviations * math.sqrt(scale)) ** 3


def is_consistent(counts: Tensor, probabilities: Tensor) -> bool:
    """Return whether the counts are consistent with the probabilities. Any count at probability 0 is inconsistent."""
    if bool((counts[probabilities == 0] > 0).any()):
        return False
    possible = probabilities > 0
    statistic, freedom = chi_square(counts[possible], probabilities[possible])
    return statistic <= chi_square_limit(freedom)
