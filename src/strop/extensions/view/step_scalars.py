"""The scalars of one stored step's rollouts, read from a few columns of its file, without texts, tokens or log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.rollout_store.stored_files import naming_damage, open_parquet


def to_numbers(column: Any, kind: Any) -> np.ndarray:
    """Return a column of numbers or booleans as an array of type ``kind``, [N]. Nulls become NaN; a ``kind`` without NaN must
    have none.
    """
    array = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    if hasattr(array, "chunks"):
        array = array.chunk(0)
    if not len(array):
        return np.empty(0, kind)
    stored = np.dtype(np.uint8 if kind is np.bool_ else kind)
    array = array.cast(str(stored).replace("float64", "double"))
    if array.null_count:
        array = array.fill_null(float("nan"))
    found: np.ndarray = np.frombuffer(array.buffers()[1], dtype=stored, count=len(array), offset=array.offset * stored.itemsize)
    return found.astype(kind)


def from_numbers(values: np.ndarray) -> Any:
    """Return an array as an Arrow column, [N]; booleans as 0 and 1."""
    import pyarrow as pa

    stored = np.ascontiguousarray(values.astype(np.uint8) if values.dtype == np.bool_ else values)
    kind = pa.type_for_alias(str(stored.dtype).replace("float64", "double"))
    return pa.Array.from_buffers(kind, len(stored), [None, pa.py_buffer(stored)])


def release_memory() -> None:
    """Return the memory that Arrow keeps of read files to the system."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()


NUMBERS: dict[str, Any] = {  # one value per rollout, with its type in memory and in an index file
    "step": np.int32,
    "row": np.int32,  # in the file of the step
    "group": np.int64,
    "sample": np.int32,
    "reward": np.float64,
    "advantage": np.float64,  # NaN: none
    "tokens": np.int32,  # that the policy sampled
    "kept": np.bool_,
}
REWARDS = "rewards."  # then its name: a further number, NaN for rollouts without it
MOST_REWARDS = 12  # names of a step; others are shown of single rollouts
WORDS = ("environment", "task_id", "ending", "dropped_because", "answer")
LONGEST_WORD = 200  # characters; of a longer reference answer its beginning
_READ = ("group", "sample", "sampled", "advantage", "reward", "rewards", "kept", *WORDS)


@dataclass(frozen=True)
class StepScalars:
    """Columns of one or several steps, [N] each. Words are stored as codes into their lists, so that they cost as little as
    numbers.
    """

    numbers: Mapping[str, np.ndarray]
    codes: Mapping[str, np.ndarray]
    words: Mapping[str, tuple[str, ...]]

    def __len__(self) -> int:
        return len(self.numbers["step"])

    @property
    def rewards(self) -> list[str]:
        """The names of the rewards."""
        return [name.removeprefix(REWARDS) for name in self.numbers if name.startswith(REWARDS)]

    def number(self, name: str) -> np.ndarray:
        """Return a number of each rollout, [N]; NaN where it has no reward of this name."""
        return self.numbers[name] if name in self.numbers else np.full(len(self), np.nan)

    def word(self, name: str, index: int) -> str:
        return self.words[name][int(self.codes[name][index])]


def read_step_scalars(path: Path, step: int) -> StepScalars:
    """Read a step's file. Raises OSError, or DamagedRollouts."""
    with naming_damage(path):
        return _read_scalars(path, step)


def _read_scalars(path: Path, step: int) -> StepScalars:
    columns = _read_parquet_columns(path) if path.suffix == ".parquet" else _read_jsonl_columns(path, step)
    count = len(columns["group"])
    columns |= {"step": np.full(count, step), "row": np.arange(count)}
    kinds = {**NUMBERS, **{name: np.float64 for name in columns if name.startswith(REWARDS)}}
    numbers = {name: np.asarray(columns[name], dtype=kind) for name, kind in kinds.items()}
    coded = {name: _encode(columns[name]) for name in WORDS}
    return StepScalars(
        numbers, {name: codes for name, (codes, _) in coded.items()}, {name: words for name, (_, words) in coded.items()}
    )


def join_scalars(parts: Sequence[StepScalars]) -> StepScalars:
    """Return the columns of several parts, one after another."""
    numbers = {name: np.empty(0, kind) for name, kind in NUMBERS.items()}
    for name in dict.fromkeys(name for part in parts for name in part.numbers):
        numbers[name] = np.concatenate([part.number(name) for part in parts])
    codes, words = {}, {}
    for name in WORDS:
        known: dict[str, int] = {}
        joined = [np.empty(0, np.int32)]
        for part in parts:
            places = np.array([known.setdefault(word, len(known)) for word in part.words[name]], dtype=np.int32)
            joined.append(places[part.codes[name]])
        codes[name], words[name] = np.concatenate(joined), tuple(known)
    return StepScalars(numbers, codes, words)


def take_scalars(scalars: StepScalars, mask: np.ndarray) -> StepScalars:
    """Return the rows selected by a mask, [N]. Words without rows stay in the lists."""
    return StepScalars(
        {name: column[mask] for name, column in scalars.numbers.items()},
        {name: column[mask] for name, column in scalars.codes.items()},
        scalars.words,
    )


def _encode(values: Iterable[str | None]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return a code for each value, and the words that the codes stand for; None is the empty word."""
    known: dict[str, int] = {}
    codes = np.fromiter((known.setdefault((value or "")[:LONGEST_WORD], len(known)) for value in values), dtype=np.int32)
    return codes, tuple(known)


def _read_parquet_columns(path: Path) -> dict[str, Any]:
    with open_parquet(path) as file:
        table = file.read(columns=[name for name in _READ if name in file.schema_arrow.names], use_threads=False)
    count = table.num_rows
    columns: dict[str, Any] = {name: _list_words(table[name]) if name in table.column_names else [None] * count for name in WORDS}
    columns["tokens"] = _count_sampled(table["sampled"])
    for name in ("group", "sample", "reward", "advantage", "kept"):
        columns[name] = to_numbers(table[name], NUMBERS[name])
    return columns | (_read_rewards(table["rewards"]) if "rewards" in table.column_names else {})


def _read_rewards(column: Any) -> dict[str, np.ndarray]:
    """Return each reward by name, [N], of a column of maps."""
    found: dict[str, np.ndarray] = {}
    for first, chunk in zip(np.cumsum([0, *map(len, column.chunks)]), column.chunks, strict=False):
        offsets = to_numbers(chunk.offsets, np.int64)
        rows = first + np.repeat(np.arange(len(chunk)), np.diff(offsets))
        names = chunk.keys.slice(offsets[0], len(rows)).dictionary_encode()
        codes, values = to_numbers(names.indices, np.int64), to_numbers(chunk.items.slice(offsets[0], len(rows)), np.float64)
        for code, name in enumerate(names.dictionary.to_pylist()[:MOST_REWARDS]):
            rewards = found.setdefault(f"{REWARDS}{name}", np.full(len(column), np.nan))
            rewards[rows[codes == code]] = values[codes == code]
    return found


def _list_words(column: Any) -> list[str | None]:
    """Return the words of a dictionary-encoded column, with one object for equal words."""
    words: list[str | None] = []
    for chunk in column.chunks:
        different = [*chunk.dictionary.to_pylist(), None]
        words += [different[-1 if place is None else place] for place in chunk.indices.to_pylist()]
    return words


def _count_sampled(column: Any) -> np.ndarray:
    """Return the number of true values in each list of a column."""
    lists = column.combine_chunks()
    lists = lists.chunk(0) if hasattr(lists, "chunks") and lists.num_chunks else lists
    if not len(lists):
        return np.empty(0, np.int32)
    offsets = to_numbers(lists.offsets, np.int64)
    values = to_numbers(lists.values, np.int64)
    totals = np.concatenate([[0], np.cumsum(values)])
    counts: np.ndarray = totals[offsets[1:]] - totals[offsets[:-1]]
    return counts


def _read_jsonl_columns(path: Path, step: int) -> dict[str, Any]:
    records = RolloutStore(path.parents[1], "none").read(step)
    columns: dict[str, Any] = {name: [getattr(record, name) for record in records] for name in _READ if name != "sampled"}
    rewards = columns.pop("rewards")
    for name in list(dict.fromkeys(name for each in rewards for name in each))[:MOST_REWARDS]:
        columns[f"{REWARDS}{name}"] = [each.get(name, np.nan) for each in rewards]
    columns["tokens"] = [sum(record.sampled) for record in records]
    columns["advantage"] = [np.nan if value is None else value for value in columns["advantage"]]
    return columns
