"""Rows that occur more than once: within an entry, between entries, and in what is validated on. Only digests are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from strop.runs.data_check.data_report import MOST_EXAMPLES, FaultyRow
from strop.runs.data_check.row_checks import RowsChecked

Columns = Mapping[str, Any]  # arrays by name, of the rows of one entry
Describe = Callable[[int], FaultyRow]  # a row by its position


def join_columns(chunks: Sequence[Columns]) -> dict[str, Any]:
    """Return the columns of all rows of an entry."""
    chunks = chunks or [RowsChecked().columns()]
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}


def find_repeated(columns: Columns, describe: Describe) -> tuple[int, int, tuple[FaultyRow, ...]]:
    """Return how many rows repeat an earlier one, how many of them to the letter, and the first of them."""
    later = _find_later(columns["whole"])
    exact = len(columns["exact"]) - len(np.unique(columns["exact"]))
    return len(later), min(exact, len(later)), _describe(later, columns, describe)


def find_shared(columns: Columns, others: Columns, column: str, describe: Describe) -> tuple[int, tuple[FaultyRow, ...]]:
    """Return how many rows are among the ``others`` by a digest, and the first of them."""
    shared = np.flatnonzero(np.isin(columns[column], others[column]))
    return len(shared), _describe(shared, columns, describe)


def _find_later(digests: Any) -> Any:
    """Return the indices of rows whose digest occurred before."""
    _, first = np.unique(digests, return_index=True)
    repeated = np.ones(len(digests), dtype=bool)
    repeated[first] = False
    return np.flatnonzero(repeated)


def _describe(rows: Any, columns: Columns, describe: Describe) -> tuple[FaultyRow, ...]:
    return tuple(_positions(rows[:MOST_EXAMPLES], columns, describe))


def _positions(rows: Any, columns: Columns, describe: Describe) -> Iterator[FaultyRow]:
    return (describe(int(columns["positions"][row])) for row in rows)
