"""What two equal passes of a step differ by where kernels add in the order of arrival: on a GPU without ``policy.deterministic``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from strop.config import TrainingRunConfig
from strop.runs.models import resolve_device
from strop.runs.replay.compared_metrics import ComparedMetrics, compare_metrics

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
