"""What the model answered before and after training, on the same tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.monitoring.rollout_store.rollout_record import RolloutRecord
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.rollout_store.validation_samples import ValidationSamples

TEXT_LIMIT = 4000  # characters of a message
BETTER, WORSE, SAME = 4, 2, 2  # pairs shown of each
MOST_UNREAD = 5  # files, after which no more are tried


@dataclass(frozen=True, kw_only=True)
class SamplePair:
    """A task with a sample before and one after. The sample is the first of its group, so that nobody chose it."""

    task: str
    environment: str
    question: str
    answer: str  # the expected one
    before: RolloutRecord
    after: RolloutRecord
    before_mean: float  # over the samples of the task
    after_mean: float


@dataclass(frozen=True, kw_only=True)
class SamplePairs:
    """Samples of the first and the last step that have them."""

    source: str  # validation or training
    first: int
    last: int
    shown: tuple[SamplePair, ...]
    better: int  # tasks in both whose mean is higher after
    worse: int
    same: int

    @property
    def tasks(self) -> int:
        return self.better + self.worse + self.same


def find_sample_pairs(folder: Path) -> tuple[SamplePairs | None, tuple[str, ...]]:
    """Return samples of the same tasks before and after: of validations, or else of training; None if there are none. Beside them, why
    files were passed over that cannot be read: of another version, damaged, or all of them without pyarrow.

    Tasks that became better and worse are shown, the largest changes first, and some that did not change, in their order.
    """
    unread: list[str] = []
    for name, store in (("validation", ValidationSamples(folder)), ("training", RolloutStore(folder, "none"))):
        steps = store.steps()
        before = _read_first(store, steps, name, unread)
        after = before and _read_first(store, [step for step in reversed(steps) if step > before[0]], name, unread)
        if before and after and (pairs := pair_samples(before[1], after[1])):
            return _choose(name, before[0], after[0], pairs), tuple(unread)
    return None, tuple(unread)


def _read_first(
    store: ValidationSamples | RolloutStore, steps: Sequence[int], name: str, unread: list[str]
) -> tuple[int, Sequence[RolloutRecord]] | None:
    """Return the first of the steps that can be read, with its samples, and add to ``unread`` why others cannot."""
    for step in steps:
        try:
            return step, store.read(step)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            unread.append(f"Step {step} of {name} was passed over: {type(error).__name__}: {error}")
            if len(unread) >= MOST_UNREAD:
                return None
    return None


def pair_samples(before: Sequence[RolloutRecord], after: Sequence[RolloutRecord]) -> list[SamplePair]:
    """Return a pair for each task that both have, in the order of the first."""
    groups = _group(after)
    return [
        SamplePair(
            task=task,
            environment=environment,
            question=_read_question(records[0]),
            answer=records[0].answer,
            before=records[0],
            after=groups[environment, task][0],
            before_mean=_mean(records),
            after_mean=_mean(groups[environment, task]),
        )
        for (environment, task), records in _group(before).items()
        if (environment, task) in groups
    ]


def _group(records: Sequence[RolloutRecord]) -> dict[tuple[str, str], list[RolloutRecord]]:
    groups: dict[tuple[str, str], list[RolloutRecord]] = {}
    for record in records:
        groups.setdefault((record.environment, record.task_id), []).append(record)
    return groups


def score(record: RolloutRecord) -> float:
    """Return the accuracy of a sample of a validation, or else the reward."""
    return float(record.metrics.get("accuracy", record.reward))


def _mean(records: Sequence[RolloutRecord]) -> float:
    return sum(map(score, records)) / len(records)


def _read_question(record: RolloutRecord) -> str:
    asked = [message.get("content", "") for message in record.prompt_messages if message.get("role") == "user"]
    return asked[-1] if asked else record.prompt


def _choose(source: str, first: int, last: int, pairs: Sequence[SamplePair]) -> SamplePairs:
    better = sorted(
        (pair for pair in pairs if pair.after_mean > pair.before_mean), key=lambda pair: pair.before_mean - pair.after_mean
    )
    worse = sorted(
        (pair for pair in pairs if pair.after_mean < pair.before_mean), key=lambda pair: pair.after_mean - pair.before_mean
    )
    same = [pair for pair in pairs if pair.after_mean == pair.before_mean]
    return SamplePairs(
        source=source,
        first=first,
        last=last,
        shown=(*better[:BETTER], *worse[:WORSE], *same[:SAME]),
        better=len(better),
        worse=len(worse),
        same=len(same),
    )
