"""The steps between the weights that a replay begins with and the step: trained again, and each compared with what it logged."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from strop.build.replay.replayed_run import ReplayedRun
from strop.build.replay.replayed_step import train_again

SECONDS_BETWEEN_NOTES = 10.0
Note = Callable[[str], object]


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


@dataclass(frozen=True, kw_only=True)
class RetrainedSteps:
    """The steps that were trained again on the way to a step."""

    first: int
    last: int
    compared: int  # metrics in all
    different: Sequence[int]  # the steps that did not compute what they logged; empty: all did, to the last digit
    first_different: ComparedMetrics | None
    seconds: float

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    @property
    def equal(self) -> bool:
        return not self.different


def compare_metrics(step: int, logged: Mapping[str, float], computed: Mapping[str, float]) -> ComparedMetrics:
    """Compare what a step computed with what it logged, to the last digit."""
    known = {name: value for name, value in logged.items() if name in computed}
    return ComparedMetrics(
        step=step,
        compared=len(known),
        different={name: (value, computed[name]) for name, value in known.items() if not _same(value, computed[name])},
        not_compared=sorted(set(logged) - set(computed)),
    )


async def train_between(
    opened: ReplayedRun, last: int, logged: Mapping[int, Mapping[str, float]], note: Note
) -> list[ComparedMetrics]:
    """Train the next steps of a run again, up to ``last``. Raises ReplayError, FileNotFoundError."""
    found: list[ComparedMetrics] = []
    noted = time.monotonic()
    for step in range(opened.run.step + 1, last + 1):
        trained = await train_again(opened.run, await opened.read_step())
        found.append(compare_metrics(step, logged.get(step, {}), trained.metrics))
        if not found[-1].equal and all(each.equal for each in found[:-1]):
            note(f"step {step} did not compute what it logged, so nothing after it is exact: {describe_difference(found[-1])}")
        elif step < last and time.monotonic() - noted > SECONDS_BETWEEN_NOTES:
            noted = time.monotonic()
            note(f"trained again: step {step}, {last - step} to go")
    return found


def summarize_retrained(found: Sequence[ComparedMetrics], seconds: float) -> RetrainedSteps | None:
    """Return what the steps on the way showed; None if there are none."""
    if not found:
        return None
    different = [each for each in found if not each.equal]
    return RetrainedSteps(
        first=found[0].step,
        last=found[-1].step,
        compared=sum(each.compared for each in found),
        different=tuple(each.step for each in different),
        first_different=different[0] if different else None,
        seconds=seconds,
    )


def describe_difference(found: ComparedMetrics) -> str:
    """Say how a step differs from what it logged."""
    if not found.compared:
        return "it logged no metric that a replay computes"
    name, (logged, replayed) = next(iter(sorted(found.different.items())))
    return f"{len(found.different)} of {found.compared} metrics differ, such as {name}: logged {logged!r}, replayed {replayed!r}"


def _same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))
