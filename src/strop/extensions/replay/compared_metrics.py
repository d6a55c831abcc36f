"""How the metrics of a replayed step compare with those that the run logged, and what two equal passes of a step differ by: kernels add in
the order of arrival on a GPU without ``policy.deterministic``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from strop.config import TrainingRunConfig
from strop.runs.models import resolve_device


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


FACTOR = 10.0  # how many times the difference of one pair of passes another pair may differ by


@dataclass(frozen=True, kw_only=True)
class EqualPasses:
    """A step that was trained twice as it was, from the same weights."""

    compared: int
    different: Mapping[str, tuple[float, float]]  # metric -> (first pass, second pass)

    def explains(self, name: str, logged: float, replayed: float) -> bool:
        """Whether a metric of the run and of a replay differ by no more than equal passes may.

        Two passes may have one metric in common by chance, so each may differ by as much of its size as metrics usually do."""
        first, second = self.different.get(name, (replayed, replayed))
        usual = (
            median(abs(one - other) / max(abs(one), abs(other)) for one, other in self.different.values())
            if self.different
            else 0.0
        )
        return abs(logged - replayed) <= FACTOR * max(abs(first - second), usual * max(abs(first), abs(second)))

    def unexplained(self, found: ComparedMetrics) -> list[str]:
        """Return the metrics that differ from what was logged by more than that."""
        return [name for name, pair in sorted(found.different.items()) if not self.explains(name, *pair)]


def passes_may_differ(config: TrainingRunConfig) -> bool:
    return not config.policy.deterministic and resolve_device(config.policy.device).type != "cpu"


def compare_passes(step: int, first: Mapping[str, float], second: Mapping[str, float]) -> EqualPasses:
    found = compare_metrics(step, first, second)
    return EqualPasses(compared=found.compared, different=found.different)
