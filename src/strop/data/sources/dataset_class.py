"""Custom data sets: a class or a function, named ``my_package.my_module.MyDataset``, ``module:name`` or ``file.py:name``.

It is called with ``dataset_kwargs``, and with those keys of the data entry that match its parameters.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from strop.data.builtin_dataset import Purpose
from strop.data.sources.in_memory import DatasetRecords, ListRecords, is_dataset
from strop.data.sources.records import DataError, Record, Records
from strop.safety.exits import contain_exits
from strop.user_code import UserCodeError, describe_error, describe_value, import_attribute, suggest_names

log = logging.getLogger(__name__)

DOTTED_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\.[A-Z]\w*")  # the form used by NeMo-RL
CODE_NAME = re.compile(r"(.+\.py|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):[A-Za-z_]\w*", re.DOTALL)
ROW_KEYS = ("subset", "split")  # keys that choose rows: code that does not take them would read other rows
WANTED = "return a list of dicts, a datasets.Dataset, another sequence of dicts, or an object with one of them as its attribute dataset"


def is_dataset_class(name: str) -> bool:
    """Return whether a data set name refers to code. Functions are named with a colon, classes with a colon or dotted."""
    return CODE_NAME.fullmatch(name) is not None or DOTTED_CLASS.fullmatch(name) is not None


def find_dataset_class(name: str) -> Callable[..., Any]:
    """Import the class or the function. Raises DataError."""
    path = name if ":" in name else ":".join(name.rpartition(".")[::2])
    try:
        found = import_attribute(path)
    except UserCodeError as error:
        raise DataError(
            f"dataset_name is {name!r}, which cannot be imported: {error}. Install its package, put its folder on PYTHONPATH, or name the "
            "file, as path/to/file.py:Name"
        ) from error
    if not callable(found):
        raise DataError(f"dataset_name is {name!r}, which is {describe_value(found)}; name a class or a function that makes rows")
    return found  # type: ignore[no-any-return]


def choose_arguments(
    name: str, code: Callable[..., Any], keys: Mapping[str, Any], options: Mapping[str, Any], purpose: Purpose
) -> dict[str, Any]:
    """Return the arguments of the code: ``options``, and those of ``keys`` and ``purpose`` that match its parameters.

    Code with ``**kwargs`` gets every set key, as in NeMo-RL. Raises DataError for an unknown or missing option, and for an
    ignored key that chooses rows.
    """
    try:
        parameters = inspect.signature(code).parameters.values()
    except (TypeError, ValueError):  # C functions have no signature
        return dict(options)
    named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    given = {key: value for key, value in keys.items() if value is not None}
    unknown = [] if takes_all else [key for key in options if key not in named]
    if unknown:
        raise DataError(f"dataset_kwargs has {unknown[0]!r}, which {name} does not take{suggest_names(unknown[0], named)}")
    if lost := [key for key in ROW_KEYS if key in given and key not in named | set(options) and not takes_all]:
        raise DataError(
            f"{lost[0]} is {given[lost[0]]!r}, but {name} has no parameter {lost[0]!r} and would read other rows; set {lost[0]} to null, "
            "or give the code the parameter"
        )
    arguments = {key: value for key, value in given.items() if key in named or takes_all}
    arguments |= {"purpose": purpose} if "purpose" in named else {}
    arguments |= options
    needed = [each.name for each in parameters if each.default is each.empty and each.name in named - set(arguments)]
    if needed:
        raise DataError(f"{name} needs {', '.join(needed)}; set dataset_kwargs.{needed[0]}")
    return arguments


def call_dataset_class(name: str, keys: Mapping[str, Any], options: Mapping[str, Any], purpose: Purpose) -> Any:
    """Call the code and return its rows unchanged; for an object with the attribute ``dataset``, that attribute.

    For validation and evaluation, ``val_dataset`` is used if present. Any error of the code becomes a DataError.
    """
    code = find_dataset_class(name)
    arguments = choose_arguments(name, code, keys, options, purpose)
    try:
        with contain_exits():
            made = code(**arguments)
            held_out = None if purpose == "train" else getattr(made, "val_dataset", None)
            return getattr(made, "dataset", made) if held_out is None else held_out
    except Exception as error:
        raise DataError(f"{name}({', '.join(sorted(arguments))}) raised {describe_error(error)}") from error


def open_made_rows(name: str, rows: Any, split: str | None, purpose: Purpose) -> Records:
    """Open what a class or a function returned. Raises DataError."""
    rows = choose_split(name, rows, split, purpose)
    if isinstance(rows, Records):
        return rows
    readable = isinstance(rows, Sequence) or (hasattr(rows, "__len__") and hasattr(rows, "__getitem__"))
    if not readable or isinstance(rows, str | bytes | Mapping):
        is_stream = isinstance(rows, Iterable) and not isinstance(rows, str | bytes | Mapping)
        hint = (
            "; what can be read only from its beginning, such as a generator, needs streaming: true in the entry"
            if is_stream
            else ""
        )
        raise DataError(f"{name} returned {describe_value(rows)} of the type {type(rows).__name__}; {WANTED}{hint}")
    if not len(rows):
        raise DataError(f"{name} returned no rows; a dataset needs at least one")
    if is_dataset(rows):
        return DatasetRecords(name, rows)
    return ListRecords(name, rows) if isinstance(rows, list) and _are_records(name, rows) else MadeRecords(name, rows)


def choose_split(name: str, rows: Any, split: str | None, purpose: Purpose) -> Any:
    """Return the rows; of several splits, the requested one. Raises DataError."""
    if type(rows).__name__ not in ("DatasetDict", "IterableDatasetDict"):
        return rows
    usual = {"train": ("train",), "validation": ("validation", "test"), "evaluation": ("test", "validation")}[purpose]
    wanted = [split] if split else [each for each in usual if each in rows]
    if not wanted or wanted[0] not in rows:
        raise DataError(f"{name} returned a {type(rows).__name__} with the splits {sorted(rows)}; set split to one of them")
    return rows[wanted[0]]


def _are_records(name: str, rows: Sequence[Any]) -> bool:
    for index, row in enumerate(rows):
        check_record(row, f"{name}, row {index + 1}")
    return True


def check_record(row: Any, where: str) -> Record:
    """Return the row. Raises DataError if it is no mapping."""
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is {describe_value(row)}, not a dict; a row is a dict of columns, such as prompt and answer")
    return row


class MadeRecords(Records):
    """A sequence made by user code, such as a map-style torch dataset. Rows are created when they are read."""

    def __init__(self, name: str, rows: Any) -> None:
        self.name, self._rows = name, rows

    def __len__(self) -> int:
        return len(self._rows)

    def read_record(self, index: int) -> Record:
        try:
            with contain_exits():
                row = self._rows[index]
        except Exception as error:
            raise DataError(f"{self.location(index)} cannot be read: {describe_error(error)}") from error
        return check_record(row, self.location(index))

    def location(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"

    def __iter__(self) -> Iterator[Record]:  # a torch dataset may not raise IndexError after its last row
        return (self.read_record(index) for index in range(len(self)))
