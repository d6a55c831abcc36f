"""The questions of evaluation sets, which training data is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from strop.data.builtin_sets import BUILTIN_DATASETS
from strop.data.data_config import DataEntryConfig
from strop.data.sources.peek import is_on_this_machine
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.extensions.code.problem_rows import find_shape

MOST_NAMES = 6  # of evaluation sets that the note lists


@dataclass
class EvaluationQuestions:
    """Questions by their place: the name of the set, a tab, and the row."""

    texts: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_questions(names: Sequence[str] | None, training: Sequence[DataEntryConfig]) -> EvaluationQuestions:
    """Read the questions of evaluation sets; by default of those built-in ones that are on this machine.

    Raises DataError for a set that is named and cannot be read.
    """
    questions = EvaluationQuestions()
    asked = list(find_local_sets()) if names is None else list(names)
    read = []
    for name in asked:
        try:
            questions.texts += _read_set(name)
        except DataError as error:
            if names is not None:
                raise DataError(f"--against {name}: {error}") from error
            questions.notes.append(f"{name} is on this machine and cannot be read, so nothing was compared with it: {error}")
        else:
            read.append(name)
    if read:
        questions.notes.append(f"training data was compared with {len(questions.texts):,} questions of {_join_names(read)}")
    return questions


def _join_names(names: Sequence[str]) -> str:
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[:MOST_NAMES])} and {len(names) - MOST_NAMES} others that are on this machine"


def find_local_sets() -> Iterator[str]:
    """Yield the built-in evaluation sets that are on this machine, each once."""
    known = set()
    for name, builtin in BUILTIN_DATASETS.items():
        reported = builtin.grader is not None or builtin.splits.evaluation is not None or builtin.splits.train is None
        place = (builtin.hub, builtin.subset, builtin.splits.choose("evaluation"))
        if reported and place not in known and is_on_this_machine(name):
            known.add(place)
            yield name


def _read_set(name: str) -> Iterator[tuple[str, str]]:
    source = DataSource(dataset_name=name, purpose="evaluation")
    _, records = source.open_records()
    try:
        shape = find_shape(records[0])
    except DataError:
        for row in source.load_rows(needs_answers=False):
            index = int(row.id.rpartition(":")[2])
            yield f"{name}\t{records.location(index)}", row.question
        return
    column = next(key for key in shape.question if key in records[0])
    for index, record in enumerate(records):
        yield f"{name}\t{records.location(index)}", str(record[column])
