"""Measure the speed of a run and estimate the remaining time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

from strop.monitoring.console.columns import TOTAL_TIME

WINDOW = 20  # steps to average over; enough to include occasional validations and checkpoints


class Progress:
    """Measures the wall-clock time between steps, including validation and checkpoints."""

    def __init__(self, max_steps: int | None, clock: Callable[[], float]) -> None:
        self.max_steps = max_steps
        self.step = 0
        self._clock = clock
        self._started = clock()
        self._step_times: deque[tuple[int, float]] = deque(maxlen=WINDOW + 1)
        self._reported_seconds = math.nan
        self._resumed_step = -1

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step = step
        self._reported_seconds = metrics.get(TOTAL_TIME, self._reported_seconds)
        if not self._step_times or step > self._step_times[-1][0]:
            self._step_times.append((step, self._clock()))

    def resume(self, step: int) -> None:
        self.step = self._resumed_step = step

    def is_known(self, step: int) -> bool:
        """Return whether a step precedes the resumption of the run, and so was already shown."""
        return step <= self._resumed_step

    @property
    def elapsed(self) -> float:
        return self._clock() - self._started

    @property
    def seconds_per_step(self) -> float:
        """Mean wall-clock time per step. With fewer than two steps, the last logged step time; NaN before that."""
        if len(self._step_times) < 2:
            return self._reported_seconds
        (first, began), (last, ended) = self._step_times[0], self._step_times[-1]
        return (ended - began) / (last - first)

    @property
    def eta_seconds(self) -> float:
        """Estimated seconds until the end, counting down between steps. NaN if unknown."""
        if self.max_steps is None:
            return math.nan
        if self.step >= self.max_steps:
            return 0.0
        since = self._clock() - self._step_times[-1][1] if self._step_times else 0.0
        return max((self.max_steps - self.step) * self.seconds_per_step - since, 0.0)
