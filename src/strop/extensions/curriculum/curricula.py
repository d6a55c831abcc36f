"""Curricula by the difficulty of tasks and by their success rate, and how a configuration names one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strop.data.sources.records import DataError
from strop.extensions.curriculum.base import Choice, Curriculum, Draw, TaskOutcome
from strop.extensions.curriculum.curriculum_keys_config import CurriculumKeys, DifficultyConfig, SuccessRateConfig
from strop.safety.exits import contain_exits
from strop.types import Task
from strop.user_code import UserCodeError, describe_error, describe_value, import_attribute


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


# Prefers tasks that the policy solves sometimes: tasks always or never solved give group-relative advantages no signal.
#
# Knowledge about a task's success rate is a Beta distribution (Qu et al. 2025, arXiv 2507.04632), because a group without a success
# does not prove that a task is impossible:
#
#     p ~ Beta(1/2 + successes, 1/2 + failures)
#
#     counts are multiplied by ``decay`` with each new result, and for each epoch of draws since the last one, as the policy changes
#
# The value of a task is its expected signal: the probability that its next group of G rollouts is neither all right nor all wrong
# (the groups that Yu et al. 2025, arXiv 2503.14476, and Zhang et al. 2025, arXiv 2506.09016, keep),
#
#     value = E[1 - p^G - (1 - p)^G]
#
# Tasks with a result are drawn in proportion to value^2. Instead, a task never seen is drawn with probability new / (new + known),
# where new is the mean value of all tasks seen and known the expected value of a drawn one. After a draw a task rests for 1 /
# ``repeats`` of an epoch of draws, after an error for a whole one, so that the policy does not learn a few tasks at the expense of
# the others. Tasks in flight are not drawn.

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


# Create a curriculum from its configuration section and the tasks of an entry.

KEY = "data.curriculum"


def make_curriculum(config: CurriculumKeys, tasks: Sequence[Task], entry: str, seed: int) -> Curriculum:
    """Create the curriculum for an entry's tasks. ``entry`` names the entry in messages. Raises DataError."""
    if hasattr(tasks, "load_state"):
        raise DataError(
            f"{KEY}.name is {config.name}, but {entry} is read as a stream, in which no task can be chosen by its number; set {KEY}.name="
            "none, or read the data as a whole"
        )
    match config.name:
        case "difficulty":
            return DifficultyCurriculum(read_difficulties(str(config.difficulty.by), tasks, entry), config.difficulty, seed)
        case "success_rate":
            return SuccessRateCurriculum(len(tasks), config.success_rate)
    return _make_own(config, tasks)


def read_difficulties(by: str, tasks: Sequence[Task], entry: str) -> list[float]:
    """Return the difficulty of each task, from a column of its row or a function. Raises DataError."""
    measure = _import_function(by) if ":" in by else lambda task: read_column(task, by)
    return [_measure_task(measure, tasks[index], by, entry) for index in range(len(tasks))]


def read_column(task: Task, column: str) -> Any:
    """Return the value of a column, or of a nested one as ``a.b``. Raises DataError."""
    value: Any = task.metadata
    names = [column] if column in task.metadata else column.split(".")
    for name in names:
        if not isinstance(value, dict) or name not in value:
            raise DataError(
                f"{task.id} has no column {column!r}; there are: {', '.join(map(str, task.metadata)) or 'none'}. Set "
                f"{KEY}.difficulty.by to one of these, or to a function of a task as file.py:name"
            )
        value = value[name]
    return value


def _measure_task(measure: Callable[[Task], Any], task: Task, by: str, entry: str) -> float:
    try:
        with contain_exits():
            value = measure(task)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{KEY}.difficulty.by: {by} raised {describe_error(error)} for {task.id} of {entry}") from error
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(
            f"{KEY}.difficulty.by: {by} is {describe_value(value)} for {task.id} of {entry}, which is not a number; name a column of "
            "numbers, or a function of a task as file.py:name that returns one"
        )
    return number


def _import_function(path: str) -> Callable[[Task], Any]:
    function = _import(path, f"{KEY}.difficulty.by")
    if not callable(function):
        raise DataError(f"{KEY}.difficulty.by: {path} is {describe_value(function)}, not a function of a task")
    measure: Callable[[Task], Any] = function
    return measure


def _make_own(config: CurriculumKeys, tasks: Sequence[Task]) -> Curriculum:
    kind = _import(config.name, f"{KEY}.name")
    if not (isinstance(kind, type) and issubclass(kind, Curriculum)):
        raise DataError(
            f"{KEY}.name: {config.name} is {describe_value(kind)}, not a subclass of strop.extensions.curriculum.base.Curriculum"
        )
    try:
        with contain_exits():
            curriculum: Curriculum = kind(tasks=tasks, **config.kwargs)  # type: ignore[call-arg]
    except Exception as error:
        raise DataError(
            f"{KEY}: {config.name}(tasks=..., {', '.join(f'{name}=...' for name in config.kwargs)}) raised {describe_error(error)}"
        ) from error
    return curriculum


def _import(path: str, key: str) -> Any:
    try:
        return import_attribute(path)
    except UserCodeError as error:
        raise DataError(f"{key}: {error}") from error
