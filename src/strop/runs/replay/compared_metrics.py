"""How the metrics of a replayed step compare with those that the run logged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ComparedMetrics:
    """How the metrics of a step compare with those that the run logged."""

    step: int
    compared: int
    different: Mapping[str, tuple[float, float]]  # name -> (logged, replayed)
    not_compared: Sequence[str]  # logged by the run and not computed by a replay: times, validation, weights sent

    @property
    def equal(self) -> bool:
        return bool(self.compared) and not self.different


def compare_metrics(step: int, logged: Mapping[str, float], computed: Mapping[str, float]) -> ComparedMetrics:
    """Compare what a step computed with what it logged, to the last digit."""
    known = {name: value for name, value in logged.items() if name in computed}
    return ComparedMetrics(
        step=step,
        compared=len(known),
        different={name: (value, computed[name]) for name, value in known.items() if not _same(value, computed[name])},
        not_compared=sorted(set(logged) - set(computed)),
    )


def _same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))
