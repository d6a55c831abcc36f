"""A sequential test that may be looked at after every step: an e-process, by betting.

The null hypothesis says of numbers x_1, x_2, ... in [0, 1] that each has a mean of at most m_t, given all that came before. Someone who
bets a share of his wealth on x_t > m_t multiplies it by 1 + b (x_t - m_t) / m_t, with 0 <= b <= 1, and cannot expect to gain under the
null. So by Ville's inequality the wealth ever reaches 1 / alpha with a probability of at most alpha, however long the run is. The
wealth is split over several shares b, and over the steps at which to begin (1 / (s (s + 1)) at step s): a change late in a run is found,
too. (Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, 2020; Shin, Ramdas and Rinaldo, E-detectors, 2022.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SHARES = (0.1, 0.3, 0.7)
MOST = 1e12  # wealth beyond which nothing changes


@dataclass
class EProcess:
    """The wealth after some steps, by share."""

    steps: int = 0
    wealth: list[float] = field(default_factory=lambda: [0.0] * len(SHARES))  # of what has begun

    def update(self, values: Sequence[float], bound: float) -> float:
        """Take in a step's numbers, each with a mean of at most ``bound`` in (0, 1] under the null. Return the e-value."""
        self.steps += 1
        bound = min(max(bound, 1e-3), 1.0)
        started = 1 / (self.steps * (self.steps + 1))
        for index, share in enumerate(SHARES):
            wealth = self.wealth[index] + started
            for value in values:
                wealth *= 1 + share * (min(max(value, 0.0), 1.0) - bound) / bound
            self.wealth[index] = min(wealth, MOST)
        return self.evidence

    @property
    def evidence(self) -> float:
        """The e-value: the mean wealth, with what has not begun."""
        return sum(self.wealth) / len(SHARES) + 1 / (self.steps + 1)
