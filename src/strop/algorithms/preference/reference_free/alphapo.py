"""AlphaPO (arXiv 2501.03884): SimPO with a reward of another shape."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.preference.reference_free.simpo import SimPO


@dataclass(frozen=True, kw_only=True)
class AlphaPO(SimPO):
    """SimPO with h = (1 - p^-alpha) / alpha, p the geometric mean of a completion's token probabilities.

    ``alpha`` above 0 has a steeper reward for unlikely completions and a flatter one for likely ones, so that those stop being pushed
    earlier; below 0 it is the other way round, and 0 is SimPO.
    """

    alpha: float = 0.25
