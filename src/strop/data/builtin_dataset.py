"""An entry of the built-in data sets: a short name for a hub dataset, with its columns, splits and grading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Purpose = Literal["train", "validation", "evaluation"]
ReadRow = Callable[[Any, str, str | None], Mapping[str, Any]]
"""Reads a row of another form: (record, where, folder of its images) -> further columns. Raises DataError."""

SplitRow = Callable[[Any, str], Iterable[Mapping[str, Any]]]
"""Makes several rows, or none, of one: (record, where) -> records. Raises DataError."""


@dataclass(frozen=True)
class Splits:
    """The splits of a data set by purpose. None: it has no split for it."""

    train: str | None = "train"
    validation: str | None = None
    evaluation: str | None = None  # what is reported

    def choose(self, purpose: Purpose) -> str:
        """Return the split for a purpose: its own, otherwise another one of the set."""
        order = {
            "train": (self.train, self.evaluation, self.validation),
            "validation": (self.validation, self.evaluation, self.train),
            "evaluation": (self.evaluation, self.validation, self.train),
        }
        return next(split for split in order[purpose] if split is not None)


@dataclass(frozen=True)
class Choices:
    """The columns with the options of multiple-choice questions: one column per option, or a single one with a list."""

    options: tuple[str, ...]
    first_is_correct: bool = False  # options are then shuffled by the question; otherwise a column has the letter


@dataclass(frozen=True)
class Grader:
    """The environment that grades a set as usually reported, and its options."""

    environment: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Condition:
    """A condition that a row's column must meet: it is exactly one of some texts, contains none of some texts in any case, or is
    a list that is not too long.
    """

    column: str
    one_of: tuple[str, ...] = ()
    none_of: tuple[str, ...] = ()  # a column without a value counts as ""
    at_most: int | None = None  # items of a list


@dataclass(frozen=True)
class BuiltinDataset:
    """One entry of the catalogue. Its columns apply unless the configuration names others."""

    hub: str  # OWNER/NAME, or the address of a file
    splits: Splits = Splits()
    input_key: str = "problem"
    output_key: str = "answer"  # empty: no column has answers
    subset: str | None = None  # several are joined by commas
    revision: str | None = None  # hub revision; None: the newest
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by subset, instead of a loading script (never run)
    answer_marker: str | None = None  # the reference answer follows the last occurrence
    system_key: str | None = None  # the column of a system prompt to put before a conversation
    keep: tuple[Condition, ...] = ()  # rows must meet all of these
    read_row: ReadRow | None = None
    split_row: SplitRow | None = None
    choices: Choices | None = None
    split_hubs: Mapping[str, str] = field(default_factory=dict)  # splits stored as the only split of another hub set
    media_files: str | None = None  # required content of the folder media_data_dir, for sets whose images are separate files
    grader: Grader | None = None  # None: the run's environment
    prompt: str | None = None  # usual wording of a question, with {question} as placeholder; None: the question only

    def find_split(self, split: str) -> tuple[str, str]:
        """Return the hub dataset that contains a split, and the split's name there."""
        return (self.split_hubs[split], "train") if split in self.split_hubs else (self.hub, split)
