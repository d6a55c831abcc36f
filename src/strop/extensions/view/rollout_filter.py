"""A query over the rollout index: conditions and an order."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strop.extensions.view.rollout_index import IndexSegment, RolloutIndex, iter_texts
from strop.extensions.view.step_scalars import REWARDS, StepScalars, to_numbers

ORDERS = ("step", "reward", "tokens", "advantage", "task", "answer")  # and rewards.NAME; falling with a minus before it
_WORDS = {"task": "task_id", "answer": "answer"}


def is_order(name: str) -> bool:
    return name.removeprefix("-") in ORDERS or name.removeprefix("-").startswith(REWARDS)


@dataclass(frozen=True, kw_only=True)
class RolloutFilter:
    """Conditions that a rollout must all meet; None or empty means no condition. Ranges include their ends."""

    steps: tuple[int, int] | None = None
    task: str | None = None
    environment: str | None = None
    ending: str | None = None
    answer: str | None = None  # the reference
    kept: bool | None = None
    reward: tuple[float | None, float | None] = (None, None)
    part: str = ""  # the name of a reward; empty: ``reward`` is of the whole
    tokens: tuple[float | None, float | None] = (None, None)

    def match(self, scalars: StepScalars) -> np.ndarray | None:
        """Return a mask over the rollouts, [N]; None for all of them."""
        mask: np.ndarray | None = None

        def demand(condition: np.ndarray) -> None:
            nonlocal mask
            mask = condition if mask is None else mask & condition

        if self.steps is not None:
            demand((scalars.numbers["step"] >= self.steps[0]) & (scalars.numbers["step"] <= self.steps[1]))
        for name, wanted in (
            ("task_id", self.task), ("environment", self.environment), ("ending", self.ending), ("answer", self.answer),
        ):  # fmt: skip
            if wanted is not None:
                words = scalars.words[name]
                demand(scalars.codes[name] == (words.index(wanted) if wanted in words else -1))
        if self.kept is not None:
            demand(scalars.numbers["kept"] == self.kept)
        for name, (low, high) in ((f"{REWARDS}{self.part}" if self.part else "reward", self.reward), ("tokens", self.tokens)):
            if low is not None:
                demand(scalars.number(name) >= low)
            if high is not None:
                demand(scalars.number(name) <= high)
        return mask

    def may_match(self, segment: IndexSegment) -> bool:
        """Return whether a segment can contain matching rollouts, judging only by its steps."""
        if self.steps is None or not segment.stamps:
            return True
        return min(segment.stamps) <= self.steps[1] and max(segment.stamps) >= self.steps[0]


@dataclass(frozen=True)
class FoundRollouts:
    """The rollouts found by a filter, in the requested order, as positions in the segments."""

    segments: tuple[IndexSegment, ...]
    places: np.ndarray  # [N] over the concatenation of the segments
    starts: np.ndarray  # [S] start of each segment in it

    def __len__(self) -> int:
        return len(self.places)

    def take(self, first: int, count: int) -> list[tuple[StepScalars, int]]:
        """Return the columns and the row in them for ``count`` rollouts from ``first`` on."""
        places = self.places[max(first, 0) : max(first, 0) + max(count, 0)]
        owners = np.searchsorted(self.starts, places, side="right") - 1
        return [
            (self.segments[owner].scalars, int(place - self.starts[owner])) for owner, place in zip(owners, places, strict=True)
        ]

    def column(self, name: str) -> np.ndarray:
        """Return a number per rollout, [N], in the requested order."""
        columns = [segment.scalars.numbers[name] for segment in self.segments]
        return np.concatenate(columns)[self.places] if columns else np.empty(0, np.int64)

    def keep(self, mask: np.ndarray) -> FoundRollouts:
        """Return the rollouts of a mask, [N]."""
        return FoundRollouts(self.segments, self.places[mask], self.starts)


def find_rollouts(segments: Sequence[IndexSegment], wanted: RolloutFilter, order: str = "-step") -> FoundRollouts:
    """Return the rollouts of segments (in order of steps) that match a filter. Those without a sort value come last."""
    lengths = [len(segment.scalars) for segment in segments]
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.int64) if segments else np.empty(0, np.int64)
    name, falling = order.removeprefix("-"), order.startswith("-")
    kind = np.int32 if sum(lengths) < 2**31 else np.int64
    found, keys = [np.empty(0, kind)], [np.empty(0)]
    ranks = _rank_words(segments, _WORDS[name]) if name in _WORDS else None
    for segment, start in zip(segments, starts, strict=True):
        if not wanted.may_match(segment):
            continue
        mask = wanted.match(segment.scalars)
        rows = np.arange(len(segment.scalars)) if mask is None else np.flatnonzero(mask)
        found.append((start + rows).astype(kind))
        keys.append((segment.scalars.number(name) if ranks is None else ranks(segment.scalars))[rows])
    places: np.ndarray = np.concatenate(found)
    if order != "step":  # segments and their rows are already in this order
        values = np.concatenate(keys)
        missing = np.isnan(values)
        ranked = np.argsort(np.where(missing, np.inf, -values if falling else values), kind="stable")
        places = places[ranked]
    return FoundRollouts(tuple(segments), places, starts)


def _rank_words(segments: Sequence[IndexSegment], name: str) -> Callable[[StepScalars], np.ndarray]:
    """Return what gives each rollout the place of its word among those of all segments, [N]; numbers in words count as numbers."""
    words = sorted({word for segment in segments for word in segment.scalars.words[name]}, key=natural_key)
    places = {word: place if word else math.nan for place, word in enumerate(words)}
    return lambda scalars: np.array([places[word] for word in scalars.words[name]] or [0.0])[scalars.codes[name]]


def natural_key(text: str) -> list[tuple[bool, int, str]]:
    """``a:10`` comes after ``a:9``."""
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d{1,18})", text)]


SECONDS = 1.0  # of one request
MOST_MATCHES = 100_000  # limit at which a search ends
COLUMNS = ("completion", "prompt", "answer", "error", "output")


class TextSearch:
    """Case-insensitive search in the text that the model wrote and read. The newest steps come first."""

    def __init__(self, index: RolloutIndex, text: str, columns: Sequence[str] = COLUMNS) -> None:
        self._index, self._text, self._columns = index, text, columns
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
            for first, table in iter_texts(path, self._columns) if path is not None else ():
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
