"""Weights that change over the steps of training."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class WeightSchedule:
    """A weight by step: as given at the steps of ``points``, constant before the first and after the last, and interpolated by
    ``kind`` in between.
    """

    kind: Literal["linear", "cosine", "steps"]  # steps: the weight of the previous point
    points: tuple[tuple[int, float], ...]  # (step, weight), steps ascending

    def at(self, step: int) -> float:
        after = bisect_right([start for start, _ in self.points], step)
        if after == 0:
            return self.points[0][1]
        if after == len(self.points) or self.kind == "steps":
            return self.points[after - 1][1]
        (start, first), (end, second) = self.points[after - 1], self.points[after]
        share = (step - start) / (end - start)
        if self.kind == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return first + share * (second - first)
