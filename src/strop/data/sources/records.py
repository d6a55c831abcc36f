"""An open data file or hub dataset: a sequence of mappings, read by index."""

from __future__ import annotations

import difflib
import hashlib
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

from strop.problems import LONGEST_MESSAGE
from strop.safety.printable import shorten

T = TypeVar("T")
Record = Mapping[str, Any]
ReadText = Callable[[Record, str, str, str], str]
"""Reads a text: (record, key, the setting that names the key, location) -> text."""


class Indexed(Sequence[T]):
    """A sequence whose items are made when they are read."""

    @abstractmethod
    def item(self, index: int) -> T:
        """Return the item with an index in ``range(len(self))``."""

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        chosen = range(len(self))[index]
        return self.item(chosen) if isinstance(chosen, int) else [self.item(each) for each in chosen]


class Records(Indexed[Record]):
    """Records by index. ``location(i)`` locates a record for error messages, by line or row."""

    name: str
    uniform: bool = False  # every record has the columns and types of the first
    lenient: bool = False  # errors are raised when a record is read rather than when the data is opened

    @abstractmethod
    def read_record(self, index: int) -> Record: ...

    @abstractmethod
    def location(self, index: int) -> str: ...

    def item(self, index: int) -> Record:
        return self.read_record(index)

    def iter_column(
        self, key: str, option: str, read: ReadText | None = None, indices: Sequence[int] | None = None
    ) -> Iterator[str]:
        """Iterate over the texts under ``key``, read by ``read`` (default: ``get_text``). ``option`` is the setting that names the key.

        ``indices``: the records to read, in ascending order (default: all).
        """
        chosen = indices if indices is None or isinstance(indices, range) else frozenset(indices)
        records = ((index, each) for index, each in enumerate(self.select_column(key)) if chosen is None or index in chosen)
        return ((read or get_text)(record, key, option, self.location(index)) for index, record in records)

    def iter_values(self, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Iterate over the values of some columns, None where a record does not have one."""
        return (tuple(record.get(column) for column in columns) for record in self)

    def select_column(self, key: str) -> Iterable[Record]:
        """Return the records; columns other than that of ``key`` may be missing."""
        return self


_MISSING = object()


def has_key(record: Record, key: str) -> bool:
    return _resolve_key(record, key) is not _MISSING


def get_value(record: Record, key: str, option: str, where: str) -> Any:
    """Return the value under a dotted ``key`` (``prompt.0.content``). ``option`` is the setting that names the key. Raises DataError."""
    value = _resolve_key(record, key)
    if value is _MISSING:
        close = difflib.get_close_matches(key, [str(name) for name in record], n=1, cutoff=0.6) if len(key) < 200 else []
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise DataError(f"{where} has no key {key!r}; its keys are {sorted(record)}. Set {option} to one of them{hint}")
    return value


def _resolve_key(record: Record, key: str) -> Any:
    value: Any = record
    for part in [key] if key in record else key.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return _MISSING
    return value


def get_text(record: Record, key: str, option: str, where: str) -> str:
    """Return the text or number under a dotted ``key``, as text. Raises DataError for other values."""
    value = get_value(record, key, option, where)
    is_number = (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and math.isfinite(value))
    if not (is_number or isinstance(value, str)):
        raise DataError(
            f"{where}: {key!r} is {value!r:.80}, which is not text. Set {option} to a key that holds text, or fix the record"
        )
    return check_text(str(value), key, where)


def check_text(text: str, key: str, where: str) -> str:
    """Return the text. Raises DataError for a lone surrogate (half a character), which tokenizers and files reject."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {key!r} has a lone surrogate, {text[error.start]!r}, at character {error.start}: it is half of a character, and "
            "no Unicode text. Write the record again from its source, or leave it out"
        ) from error
    return text


class DataError(ValueError):
    """Invalid data. The message says what was found, where, and what to set instead."""

    def __init__(self, message: str) -> None:
        super().__init__(shorten(message, LONGEST_MESSAGE))


# Hold out rows for validation by a hash of their question, so that no question is in both parts.
#
# A random split by row leaks if questions occur more than once, as in most published math datasets.


def stable_hash(text: str, seed: int = 0) -> int:
    """Return a 64-bit hash of (text, seed) that is the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{text}".encode(), digest_size=8).digest(), "big")


def is_held_out(text: str, fraction: float, seed: int = 0) -> bool:
    """Return whether ``text`` is in the ``fraction`` of all texts that is held out for validation."""
    return stable_hash(text, seed) < fraction * 2**64


class SplitError(DataError):
    """The rows cannot be split into two non-empty parts."""


def split_by_question(questions: Iterable[str], size: float, seed: int) -> tuple[list[int], list[int]]:
    """Return row indices for training and for validation. ``size`` is a fraction of the rows below 1, a number of rows from 1 on."""
    rows = list(questions)
    counts = Counter(rows)
    target = round(size * len(rows)) if size < 1 else int(size)
    if not 0 < target < len(rows):
        raise SplitError(
            f"split_validation_size {size:g} of {len(rows)} rows holds {target} out for validation; both parts need at least one row"
        )
    held_out: set[str] = set()
    num_held_out = 0
    for question in sorted(counts, key=lambda question: stable_hash(question, seed)):
        if num_held_out >= target:
            break
        held_out.add(question)
        num_held_out += counts[question]
    if len(held_out) == len(counts):
        raise SplitError(f"{len(rows)} rows have {len(counts)} distinct questions, too few for split_validation_size {size:g}")
    validation = [index for index, question in enumerate(rows) if question in held_out]
    train = [index for index, question in enumerate(rows) if question not in held_out]
    return train, validation
