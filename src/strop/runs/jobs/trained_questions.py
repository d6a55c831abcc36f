"""Checks whether a run was trained on its evaluation questions: exact matches in local data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from strop.data.builtin_sets import BUILTIN_DATASETS
from strop.data.data_config import DataEntryConfig
from strop.data.overlap import OverlapReport, find_overlaps
from strop.data.sources.local_copies import find_copy
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource, is_local
from strop.environments.mixture import Mixture
from strop.safety.printable import shorten

MOST_ROWS = 100_000  # of training data: seconds


def warn_of_trained_questions(trained: Sequence[DataEntryConfig], evaluated: Sequence[Mixture], *, seed: int) -> Iterator[str]:
    """Yield a warning if evaluation questions occur verbatim in the run's training data, as far as that is local.

    The held-out part of a split entry and generated tasks are not training data.
    """
    entries = [entry for entry in trained if _is_here(entry)]
    if not entries:
        return
    questions = list(_list_questions(evaluated))
    texts = itertools.islice(_list_rows(entries, seed), MOST_ROWS)
    found = find_overlaps(questions, texts, threshold=2.0)  # only identical texts
    if found.exact:
        yield _describe(found)


def _describe(found: OverlapReport) -> str:
    first = found.found[0].closest[0]
    counted = f"{found.exact:,} of the {found.questions:,} questions are" if found.questions > 1 else "the question is"
    searched = f" (the first {MOST_ROWS:,} rows were searched)" if found.texts == MOST_ROWS else ""
    return (
        f"warning: {counted} in the training data of this run, word for word{searched}: {shorten(first.question, 80)} is {first.text}. The "
        "score says what was memorised; strop data check CONFIG lists the others"
    )


def _is_here(entry: DataEntryConfig) -> bool:
    """Whether the rows can be read without contacting a hub."""
    if entry.rows is not None:
        return True
    name = entry.dataset_name
    if name is None or is_local(name):
        return name is not None
    builtin = BUILTIN_DATASETS.get(name)
    try:
        return find_copy(name if builtin is None else builtin.hub) is not None
    except DataError:
        return False


def _list_questions(evaluated: Sequence[Mixture]) -> Iterator[tuple[str, str]]:
    """Yield the name and question of each task. A task that cannot be created is left to the evaluation, which reports it."""
    for source in evaluated:
        for index in range(len(source)):
            try:
                _, _, task = source.at(index)
            except Exception:
                continue
            yield task.id, task.question


def _list_rows(entries: Sequence[DataEntryConfig], seed: int) -> Iterator[tuple[str, str]]:
    for entry in entries:
        try:
            for row in DataSource.from_entry(entry, seed=seed, part="train").load_rows(needs_answers=False):
                yield row.id, row.question
        except (DataError, OSError):
            continue  # data moved since then: nothing is known about it
