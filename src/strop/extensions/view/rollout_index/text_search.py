"""Incremental text search in the rollouts of many steps: each request continues it for a short time and reports its progress."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from strop.extensions.view.rollout_index.arrow_numbers import to_numbers
from strop.extensions.view.rollout_index.rollout_filter import FoundRollouts
from strop.extensions.view.rollout_index.rollout_index import RolloutIndex
from strop.extensions.view.rollout_index.stored_rows import iter_texts

SECONDS = 1.0  # of one request
MOST_MATCHES = 100_000  # limit at which a search ends
COLUMNS = ("completion", "prompt", "answer", "error", "output")


class TextSearch:
    """Case-insensitive search in the text that the model wrote and read. The newest steps come first."""

    def __init__(self, index: RolloutIndex, text: str) -> None:
        self._index, self._text = index, text
        self._lock = threading.Lock()
        self._candidates: FoundRollouts | None = None
        self._rows: dict[int, np.ndarray] = {}  # of the candidates, by step
        self._steps: list[int] = []  # remaining steps; the newest is last
        self._done: set[int] = set()
        self._matches: dict[int, np.ndarray] = {}  # rows by step
        self._count = 0

    def go_on(self, candidates: FoundRollouts, seconds: float = SECONDS) -> dict[str, Any]:
        """Search for a while. Return the numbers of searched and of all steps, the oldest searched step, and whether the search
        is complete.
        """
        deadline = time.monotonic() + seconds
        with self._lock:
            if candidates is not self._candidates:
                self._take_up(candidates)
            while self._steps and self._count < MOST_MATCHES:
                self._search(self._steps.pop())
                if time.monotonic() > deadline:
                    break
            return {
                "steps": len(self._done),
                "of": len(self._done) + len(self._steps),
                "down_to": min(self._done, default=None),
                "complete": not self._steps,
                "full": bool(self._steps) and self._count >= MOST_MATCHES,
            }

    def found(self, candidates: FoundRollouts) -> FoundRollouts:
        """Return the candidates that contain the text, among those searched so far."""
        with self._lock:
            keys = [_make_keys(np.full(len(rows), step), rows) for step, rows in self._matches.items()]
        matches = np.concatenate(keys or [np.empty(0, np.int64)])
        return candidates.keep(np.isin(_make_keys(candidates.column("step"), candidates.column("row")), matches))

    def _take_up(self, candidates: FoundRollouts) -> None:
        """Add the steps that are there now; searched steps stay searched."""
        steps, rows = candidates.column("step"), candidates.column("row")
        order = np.argsort(steps, kind="stable")
        present, starts = np.unique(steps[order], return_index=True)
        parts = np.split(rows[order], starts[1:])
        self._rows = {int(step): part for step, part in zip(present, parts, strict=False) if int(step) not in self._done}
        self._steps = sorted(self._rows)
        self._candidates = candidates

    def _search(self, step: int) -> None:
        import pyarrow.compute as pc

        path, rows = self._index.file(step), self._rows.pop(step)
        self._done.add(step)
        hits: list[int] = []
        try:
            for first, table in iter_texts(path, COLUMNS) if path is not None else ():
                mask = np.zeros(table.num_rows, dtype=bool)
                for column in table.columns:
                    mask |= to_numbers(pc.fill_null(_match(column, self._text), False), np.bool_)
                hits += (first + np.flatnonzero(mask)).tolist()
        except (OSError, ValueError):  # damaged, or removed in the meantime; the list reports it for the step
            return
        matches = np.intersect1d(rows, np.array(hits, dtype=np.int64))
        if len(matches):
            self._matches[step] = matches
            self._count += len(matches)


def _match(column: Any, text: str) -> Any:
    """Return the rows that contain a text, for a column of texts or of indices into a list of distinct texts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(column.type):
        return pc.match_substring(column, text, ignore_case=True)
    array = column.combine_chunks()
    array = array.chunk(0) if hasattr(array, "chunks") else array
    return pc.match_substring(array.dictionary, text, ignore_case=True).take(array.indices)


def _make_keys(steps: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return one number for each rollout."""
    return steps.astype(np.int64) << 32 | rows.astype(np.int64)
