"""Selects stored rollouts to show, and describes those left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from strop.monitoring.rollout_store.damaged_rollouts import DamagedRollouts
from strop.monitoring.rollout_store.rollout_flags import FlaggedRollouts
from strop.monitoring.rollout_store.rollout_record import RolloutRecord
from strop.user_code import suggest_names


class RolloutSource(Protocol):
    """Stored rollouts by step: those of training, or those of validations."""

    def steps(self) -> list[int]: ...

    def read(self, step: int, task_id: str | None = None) -> list[RolloutRecord]: ...

    def read_flags(self, step: int) -> FlaggedRollouts: ...


class NoRollouts(ValueError):
    """Nothing was selected. The message lists what is available."""


@dataclass(frozen=True, kw_only=True)
class RolloutSelection:
    """What to show. A task without a step is shown over all steps, one sample each; otherwise the newest step is used."""

    step: int | None = None
    task: str | None = None
    environment: str | None = None
    ending: str | None = None
    best: int | None = None  # this many with the highest reward
    worst: int | None = None  # this many with the lowest, after the best
    flagged: bool = False  # those flagged by the reward hacking monitor
    limit: int = 4  # rollouts, if neither best nor worst is given

    @property
    def ranked(self) -> bool:
        return self.best is not None or self.worst is not None

    @property
    def over_steps(self) -> bool:
        return self.task is not None and self.step is None

    def list_steps(self, stored: Sequence[int]) -> list[int]:
        """Return the steps to read, in order. Unless ``over_steps``, only the first readable one is used."""
        if self.step is not None:
            return [self.step]
        return list(stored) if self.over_steps else list(reversed(stored))


@dataclass(frozen=True)
class SelectedRollouts:
    """The rollouts to show, and the number of matching ones."""

    records: tuple[RolloutRecord, ...]
    matching: int
    summary: str  # of the steps read
    flags: Mapping[int, FlaggedRollouts] = field(default_factory=dict)  # by step
    damaged: tuple[str, ...] = ()  # messages about unreadable files that were skipped

    def flags_of(self, record: RolloutRecord) -> tuple[str, ...]:
        return self.flags.get(record.step, {}).get((record.task_id, record.sample), ())


def select_rollouts(source: RolloutSource, selection: RolloutSelection) -> SelectedRollouts:
    """Read the rollouts of a selection, one step at a time.

    Unreadable files are skipped and reported. Raises NoRollouts, and DamagedRollouts if no requested step can be read."""
    steps = source.steps()
    if not steps:
        raise NoRollouts("no rollouts are stored")
    reader = _Reader(source)
    flags = {step: flagged for step in steps if (flagged := reader.read_flags(step))}
    if selection.flagged:
        steps = [step for step in steps if step in flags]
        if not steps:
            raise NoRollouts("the monitor of reward hacking has flagged no rollout; a detector names some from its alarm on")
    if selection.step is not None and selection.step not in steps:
        raise NoRollouts(f"there are no rollouts of step {selection.step}; stored are {_describe_steps(steps)}")
    seen = _Seen()
    matching: list[RolloutRecord] = []
    for records in reader.read(selection, steps):
        found = [record for record in seen.watch(records) if _matches(record, selection, flags)]
        seen.matching += len(found)
        matching += found[:1] if selection.over_steps and not selection.ranked else found
    if not matching:
        list(seen.watch(reader.read_any(selection.step, steps)))  # the existing names
        raise NoRollouts(f"no rollout of {_describe_range(reader.steps)} {_explain(selection, seen)}")
    return SelectedRollouts(tuple(_pick(matching, selection)), seen.matching, seen.describe(), flags, tuple(reader.damaged))


class _Reader:
    """Reads the steps of a selection, and skips unreadable files."""

    def __init__(self, source: RolloutSource) -> None:
        self._source = source
        self.steps: list[int] = []  # those that were read
        self.damaged: list[str] = []

    def read_flags(self, step: int) -> FlaggedRollouts:
        try:
            return self._source.read_flags(step)
        except DamagedRollouts as error:
            self.damaged.append(str(error))
            return {}

    def read(self, selection: RolloutSelection, stored: Sequence[int]) -> Iterator[list[RolloutRecord]]:
        """Yield the rollouts of each step. Raises DamagedRollouts if the only step cannot be read, or none can."""
        first: DamagedRollouts | None = None
        for step in selection.list_steps(stored):
            try:
                records = self._source.read(step, selection.task if selection.over_steps else None)  # a single task is read alone
            except DamagedRollouts as error:
                if selection.step is not None:
                    raise
                first = first or error
                self.damaged.append(str(error))
                continue
            self.steps.append(step)
            yield records
            if not selection.over_steps:
                return
        if first is not None and not self.steps:
            raise first

    def read_any(self, step: int | None, stored: Sequence[int]) -> list[RolloutRecord]:
        return next(self.read(RolloutSelection(step=step), stored))


class _Seen:
    """What was read, for the summary and for suggestions."""

    def __init__(self) -> None:
        self.steps: set[int] = set()
        self.tasks: Counter[str] = Counter()
        self.environments: Counter[str] = Counter()
        self.endings: Counter[str] = Counter()
        self.rewards: list[float] = []
        self.not_trained_on = 0
        self.matching = 0

    def watch(self, records: Sequence[RolloutRecord]) -> Iterator[RolloutRecord]:
        for record in records:
            self.steps.add(record.step)
            self.tasks[record.task_id] += 1
            self.environments[record.environment] += 1
            self.endings[record.ending] += 1
            self.not_trained_on += not record.kept
            if record.error is None:
                self.rewards.append(record.reward)
            yield record

    def describe(self) -> str:
        tasks = f"{len(self.tasks)} task{'s' if len(self.tasks) != 1 else ''}"
        parts = [f"{_describe_range(sorted(self.steps))}: {sum(self.tasks.values())} rollouts of {tasks}"]
        if self.rewards:
            mean = sum(self.rewards) / len(self.rewards)
            parts.append(f"reward {mean:.4g} ({min(self.rewards):.4g} to {max(self.rewards):.4g})")
        parts.append("ended by " + ", ".join(f"{name or 'nothing'} {count}" for name, count in self.endings.most_common()))
        if self.not_trained_on:
            parts.append(f"{self.not_trained_on} not trained on")
        return "; ".join(parts)


def _matches(record: RolloutRecord, selection: RolloutSelection, flags: Mapping[int, FlaggedRollouts]) -> bool:
    return (
        selection.task in (None, record.task_id)
        and selection.environment in (None, record.environment)
        and selection.ending in (None, record.ending)
        and (not selection.flagged or (record.task_id, record.sample) in flags[record.step])
    )


def _pick(records: list[RolloutRecord], selection: RolloutSelection) -> Iterator[RolloutRecord]:
    if not selection.ranked:
        yield from islice(records, selection.limit)
        return
    scored = [record for record in records if record.error is None]
    ranked = sorted(scored, key=lambda record: -record.reward)  # stable: equal rewards stay in order
    best = ranked[: selection.best or 0]
    yield from best
    worst = sorted(scored, key=lambda record: record.reward)[: selection.worst or 0]
    yield from (record for record in worst if not any(record is other for other in best))


def _explain(selection: RolloutSelection, seen: _Seen) -> str:
    if not seen.tasks:
        return "is stored: the step has none"
    for wanted, what, known in (
        (selection.environment, "is of the environment", seen.environments),
        (selection.ending, "ended by", seen.endings),
        (selection.task, "is of the task", seen.tasks),
    ):
        if wanted is not None and wanted not in known:
            names = [name for name, _ in known.most_common(20)]
            more = f" and {len(known) - len(names)} more" if len(known) > len(names) else ""
            return f"{what} {wanted!r}{suggest_names(wanted, names)}{more}"
    return "meets all conditions; leave one of the options out"


def _describe_steps(steps: Sequence[int]) -> str:
    if len(steps) <= 8:
        return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}"


def _describe_range(steps: Sequence[int]) -> str:
    first, last = min(steps), max(steps)
    return f"step {first}" if first == last else f"steps {first} to {last}"
