"""From easy tasks to hard ones: curriculum learning (Bengio et al. 2009) by a number that each task has.

The tasks are sorted, and drawn uniformly from a window that grows from ``start`` s to all of them, with progress p = step / steps:

    linear  s + (1 - s) p
    root    sqrt(s^2 + (1 - s^2) p)            competence (Platanios et al. 2019, arXiv 1903.09848)
    step    s + (1 - s) floor(p stages) / stages

Once the window holds all tasks, they come as without a curriculum: shuffled, each once per epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import numpy as np

from strop.data.curriculum.base import Choice, Curriculum, Draw
from strop.data.curriculum.curriculum_config import DifficultyConfig


class DifficultyCurriculum(Curriculum):
    """Draws from a window over the tasks in the order of their difficulty; those of equal difficulty are shuffled by the seed."""

    def __init__(self, difficulties: Sequence[float], config: DifficultyConfig, seed: int) -> None:
        ties = Random(seed).sample(range(len(difficulties)), len(difficulties))
        self._config = config
        self._difficulties = np.asarray(difficulties, dtype=np.float64)
        sign = -1.0 if config.order == "hard_to_easy" else 1.0
        self._order = np.lexsort((np.asarray(ties), sign * self._difficulties))

    def choose(self, draw: Draw) -> Choice:
        size, reached = len(self._order), compute_window(self._config, draw.step)
        last = count_tasks(reached, size)
        first = 0 if self._config.window is None else max(0, last - count_tasks(self._config.window, size))
        task = draw.usual
        if last - first < size:
            window = self._order[first:last]
            unused = window[~np.isin(window, list(draw.in_flight))]
            task = int(draw.random.choice(unused if len(unused) else window))
        metrics = {"difficulty": float(self._difficulties[task]), "window": reached, "entropy": math.log(last - first)}
        return Choice(task, metrics)


def count_tasks(share: float, size: int) -> int:
    """Return the number of tasks that a share of ``size`` tasks means, rounded up."""
    return max(1, math.ceil(share * size - 1e-9))  # 0.6000000000000001 of 10 is 6


def compute_window(config: DifficultyConfig, step: int) -> float:
    """Return the share of the tasks, in curriculum order, that the window has reached."""
    start, progress = config.start, min(1.0, step / config.steps)
    match config.pacing:
        case "linear":
            return start + (1 - start) * progress
        case "root":
            return math.sqrt(start**2 + (1 - start**2) * progress)
        case "step":
            return start + (1 - start) * math.floor(progress * config.stages) / config.stages
