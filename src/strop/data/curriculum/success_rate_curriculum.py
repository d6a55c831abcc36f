"""Prefers tasks that the policy solves sometimes: tasks always or never solved give group-relative advantages no signal.

Knowledge about a task's success rate is a Beta distribution (Qu et al. 2025, arXiv 2507.04632), because a group without a success
does not prove that a task is impossible:

    p ~ Beta(1/2 + successes, 1/2 + failures)

    counts are multiplied by ``decay`` with each new result, and for each epoch of draws since the last one, as the policy changes

The value of a task is its expected signal: the probability that its next group of G rollouts is neither all right nor all wrong
(the groups that Yu et al. 2025, arXiv 2503.14476, and Zhang et al. 2025, arXiv 2506.09016, keep),

    value = E[1 - p^G - (1 - p)^G]

Tasks with a result are drawn in proportion to value^2. Instead, a task never seen is drawn with probability new / (new + known),
where new is the mean value of all tasks seen and known the expected value of a drawn one. After a draw a task rests for 1 /
``repeats`` of an epoch of draws, after an error for a whole one, so that the policy does not learn a few tasks at the expense of
the others. Tasks in flight are not drawn.
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

PRIOR = 0.5  # successes and failures of a task before its first result (Jeffreys)
SOLVED, IMPOSSIBLE = 0.95, 0.05  # success rate thresholds of the metrics
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Pools:
    """The drawable tasks, grouped by how they are drawn."""

    known: NDArray[np.int64]
    weights: Floats  # of ``known``; they sum to 1
    new: NDArray[np.int64]
    share: float  # probability of drawing from ``new``

    @property
    def entropy(self) -> float:
        """Entropy of the draw, in nats."""
        share, weights = self.share, self.weights[self.weights > 0]
        entropy = share * math.log(len(self.new) / share) if share else 0.0
        return entropy + (float(-(weights * np.log(weights)).sum() - math.log(1 - share)) * (1 - share) if share < 1 else 0.0)

    def draw(self, random: Random) -> int:
        if random.random() < self.share:
            return int(random.choice(self.new))
        sums = np.cumsum(self.weights)
        return int(self.known[min(np.searchsorted(sums, random.random() * sums[-1], side="right"), len(sums) - 1)])


class SuccessRateCurriculum(Curriculum):
    """Draws tasks by the estimated success rate of the policy on each."""

    def __init__(self, size: int, config: SuccessRateConfig) -> None:
        self._config = config
        self._draws = 0
        self._group_size = 1  # rollouts of the latest result
        self._seen = np.zeros(size, dtype=bool)
        self._updated = np.zeros(size, dtype=np.int64)  # number of draws at each task's latest result
        self._successes = np.zeros(size)  # as they were then
        self._failures = np.zeros(size)
        self._rests_until = np.zeros(size, dtype=np.int64)  # number of draws

    def choose(self, draw: Draw) -> Choice:
        seen, size = np.flatnonzero(self._seen), len(self._seen)
        fading = self._fade(seen)
        successes, failures = PRIOR + fading * self._successes[seen], PRIOR + fading * self._failures[seen]
        rates, values = np.full(size, np.nan), np.zeros(size)
        rates[seen], values[seen] = successes / (successes + failures), self._value(successes, failures)
        pools = self._make_pools(draw, values)
        task = draw.usual if pools is None else pools.draw(draw.random)
        self._rests_until[task] = max(self._rests_until[task], self._draws + int(len(self._seen) / self._config.repeats))
        self._draws += 1
        metrics = {
            "never_seen": 1 - len(seen) / size,
            "solved": np.count_nonzero(rates >= SOLVED) / size,
            "impossible": np.count_nonzero(rates <= IMPOSSIBLE) / size,
            "entropy": 0.0 if pools is None else pools.entropy,
        }
        known = {"success_rate": float(rates[task]), "signal": float(values[task])} if self._seen[task] else {}
        return Choice(task, metrics | known)

    def _fade(self, tasks: NDArray[np.int64]) -> Floats:
        """Return the decay of the counts of tasks since their latest results."""
        faded: Floats = self._config.decay ** ((self._draws - self._updated[tasks]) / len(self._seen))
        return faded

    def _value(self, successes: Floats, failures: Floats) -> Floats:
        """Return the probability that a group is neither all right nor all wrong."""
        right, wrong = np.ones_like(successes), np.ones_like(successes)
        for each in range(max(2, self._group_size)):
            right *= (successes + each) / (successes + failures + each)
            wrong *= (failures + each) / (successes + failures + each)
        return 1 - right - wrong

    def _make_pools(self, draw: Draw, values: Floats) -> _Pools | None:
        """Return the drawable tasks; None if there are none."""
        free = self._rests_until <= self._draws
        free[list(draw.in_flight)] = False
        known, new = np.flatnonzero(free & self._seen), np.flatnonzero(free & ~self._seen)
        if not len(known):
            return _Pools(known, values[known], new, 1.0) if len(new) else None
        weights = values[known] ** 2
        weights /= weights.sum()
        value_of_new, value_of_known = values[self._seen].mean(), (weights * values[known]).sum()
        return _Pools(known, weights, new, float(value_of_new / (value_of_new + value_of_known)) if len(new) else 0.0)

    def observe(self, outcome: TaskOutcome) -> None:
        task, scores = outcome.task, [self._measure(score) for score in outcome.scores]
        if not scores:
            self._rests_until[task] = self._draws + len(self._seen)
            return
        kept = float(self._fade(np.array([task]))[0]) * self._config.decay
        self._successes[task] = kept * self._successes[task] + sum(scores)
        self._failures[task] = kept * self._failures[task] + len(scores) - sum(scores)
        self._seen[task], self._updated[task], self._group_size = True, self._draws, len(scores)

    def _measure(self, score: float) -> float:
        threshold = self._config.threshold
        return min(max(score, 0.0), 1.0) if threshold is None else float(score >= threshold)

    def state(self) -> Mapping[str, Any]:
        """Return counts, (task, successes, failures, draws at its latest result) of seen tasks, and how long others rest."""
        seen, resting = np.flatnonzero(self._seen), np.flatnonzero(self._rests_until > self._draws)
        counts = (each[seen].tolist() for each in (self._successes, self._failures, self._updated))
        return {
            "draws": self._draws,
            "group_size": self._group_size,
            "seen": [list(row) for row in zip(seen.tolist(), *counts, strict=True)],
            "resting": [[task, int(self._rests_until[task])] for task in resting.tolist()],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._draws, self._group_size = state["draws"], state["group_size"]
        for task, *row in state["seen"]:
            self._seen[task], (self._successes[task], self._failures[task], self._updated[task]) = True, row
        for task, until in state["resting"]:
            self._rests_until[task] = until
