"""Tasks that the policy solves sometimes: those that it always or never solves have no signal for group-relative advantages.

A task's success rate p is a moving average over the groups sampled for it. With G rollouts, the variance of the rewards, and with it
the size of the gradient, goes as p (1 - p), so tasks of intermediate rate teach most (as in prioritized level replay, Jiang et al. 2021,
arXiv 2010.03934, and in sampling by p (1 - p), Foster et al. 2025, arXiv 2502.12272). A draw is

    with probability ``exploration``   uniform over the tasks never seen, and those whose rest is over
    otherwise                          of a task with a known rate p, in proportion to exp(-(p - target)^2 / (2 width^2))

and where one of the two has no task, it is of the other. Solved and impossible tasks rest for a while, twice as long each time that they
are so again (at most 16 times as long); tasks in flight are not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strop.data.curriculum.base import Choice, Curriculum, Draw, TaskOutcome
from strop.data.curriculum.curriculum_config import SuccessRateConfig

LONGEST_REST = 16  # times ``rest``


@dataclass(frozen=True)
class _Pools:
    """The tasks that may be drawn, by how."""

    known: NDArray[np.int64]
    weights: NDArray[np.float64]  # of ``known``; they sum to 1
    unexplored: NDArray[np.int64]
    exploration: float  # the probability to draw of ``unexplored``

    @property
    def entropy(self) -> float:
        """Entropy of the draw, in nats."""
        share, weights = self.exploration, self.weights[self.weights > 0]
        entropy = share * math.log(len(self.unexplored) / share) if share else 0.0
        return entropy + (float(-(weights * np.log(weights)).sum() - math.log(1 - share)) * (1 - share) if share < 1 else 0.0)

    def draw(self, random: Random) -> int:
        if random.random() < self.exploration:
            return int(random.choice(self.unexplored))
        sums = np.cumsum(self.weights)
        return int(self.known[min(np.searchsorted(sums, random.random() * sums[-1], side="right"), len(sums) - 1)])


class SuccessRateCurriculum(Curriculum):
    """Draws by the policy's success rate on each task."""

    def __init__(self, size: int, config: SuccessRateConfig) -> None:
        self._config = config
        self._visits = np.zeros(size, dtype=np.int64)
        self._rates = np.full(size, np.nan)  # not a number: no group has succeeded or failed without an error
        self._rests_until = np.zeros(size, dtype=np.int64)  # the step
        self._rests = np.zeros(size, dtype=np.int64)  # in a row

    def choose(self, draw: Draw) -> Choice:
        pools = self._make_pools(draw)
        task = draw.usual if pools is None else pools.draw(draw.random)
        size, seen = len(self._visits), self._visits > 0
        metrics = {
            "never_seen": 1 - np.count_nonzero(seen) / size,
            "solved": np.count_nonzero(self._rates >= self._config.solved) / size,
            "impossible": np.count_nonzero(self._rates <= self._config.impossible) / size,
            "entropy": 0.0 if pools is None else pools.entropy,
        }
        known = {} if math.isnan(self._rates[task]) else {"success_rate": float(self._rates[task])}
        return Choice(task, {**metrics, **known})

    def _make_pools(self, draw: Draw) -> _Pools | None:
        """Return the tasks that may be drawn; None if all are in flight. If all others rest, they may be drawn all the same."""
        config = self._config
        free = np.ones(len(self._visits), dtype=bool)
        free[list(draw.in_flight)] = False
        ready = free & (self._rests_until <= draw.step)
        between = (self._rates > config.impossible) & (self._rates < config.solved)
        known, unexplored = np.flatnonzero(ready & between), np.flatnonzero(ready & ~between)
        if not len(known) and not len(unexplored):
            unexplored = np.flatnonzero(free)
        if not len(known) and not len(unexplored):
            return None
        exponents = -(((self._rates[known] - config.target) / config.width) ** 2) / 2
        weights = np.exp(exponents - exponents.max()) if len(known) else exponents
        share = 1.0 if not len(known) else config.exploration if len(unexplored) else 0.0
        return _Pools(known, weights / weights.sum() if len(known) else weights, unexplored, share)

    def observe(self, outcome: TaskOutcome) -> None:
        task, config = outcome.task, self._config
        self._visits[task] += 1
        if outcome.scores:
            result = sum(self._measure(score) for score in outcome.scores) / len(outcome.scores)
            before = float(self._rates[task])
            self._rates[task] = result if math.isnan(before) else before + config.smoothing * (result - before)
        if outcome.scores and config.impossible < self._rates[task] < config.solved:
            self._rests[task] = 0
        else:
            self._rests_until[task] = outcome.step + config.rest * min(2 ** int(self._rests[task]), LONGEST_REST)
            self._rests[task] += 1

    def _measure(self, score: float) -> float:
        threshold = self._config.threshold
        return min(max(score, 0.0), 1.0) if threshold is None else float(score >= threshold)

    def state(self) -> Mapping[str, Any]:
        """Return (task, success rate, visits, the step until which it rests, rests in a row) of each task seen."""
        seen = np.flatnonzero(self._visits)
        rates = [None if math.isnan(rate) else rate for rate in self._rates[seen].tolist()]
        counts = (each[seen].tolist() for each in (self._visits, self._rests_until, self._rests))
        columns = (seen.tolist(), rates, *counts)
        return {"seen": [list(row) for row in zip(*columns, strict=True)]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for task, rate, visits, rests_until, rests in state["seen"]:
            self._visits[task], self._rests_until[task], self._rests[task] = visits, rests_until, rests
            self._rates[task] = np.nan if rate is None else rate
