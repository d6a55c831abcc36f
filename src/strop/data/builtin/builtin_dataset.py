"""What a built-in data set is: a short name for one of the hub, with its columns, its splits and how it is graded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Purpose = Literal["train", "validation", "evaluation"]
RowForm = Literal[
    "preferred_response",
    "boxed_solution",
    "dialogues",
    "conversation_trees",
    "tagged_solution",
    "single_image",
    "reasoning_question",
    "described_region",
]
"""How rows of another form are read (``strop.data.sources.row_readers``)."""


@dataclass(frozen=True)
class Splits:
    """The splits of a data set by what they are for. None: it has none for that."""

    train: str | None = "train"
    validation: str | None = None
    evaluation: str | None = None  # what is reported

    def choose(self, purpose: Purpose) -> str:
        """Return the split for a purpose: its own, else another one that the set has."""
        order = {
            "train": (self.train, self.evaluation, self.validation),
            "validation": (self.validation, self.evaluation, self.train),
            "evaluation": (self.evaluation, self.validation, self.train),
        }
        return next(split for split in order[purpose] if split is not None)


@dataclass(frozen=True)
class Choices:
    """The columns of the options of multiple-choice questions: one for each option, or a single one with a list."""

    options: tuple[str, ...]
    first_is_correct: bool = False  # then they are shuffled, by the question; else a column has the letter


@dataclass(frozen=True)
class Grader:
    """The environment that grades a set as it is usually reported, and its options."""

    environment: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Condition:
    """What a column must be for a row to be used: exactly one of some texts, none of them in any case, or a list that is not too long."""

    column: str
    one_of: tuple[str, ...] = ()
    none_of: tuple[str, ...] = ()  # a column without a value has the text ""
    at_most: int | None = None  # items of a list


@dataclass(frozen=True)
class BuiltinDataset:
    """One entry of the catalogue. The columns hold unless the configuration names others."""

    hub: str  # OWNER/NAME, or the address of a file
    splits: Splits = Splits()
    input_key: str = "problem"
    output_key: str = "answer"  # empty: no column has answers
    subset: str | None = None  # several, joined, have commas between them
    revision: str | None = None  # of the hub; None: the newest
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by subset, in place of a script, which is never run
    answer_marker: str | None = None  # the reference answer follows the last occurrence
    system_key: str | None = None  # the column of a system prompt to put before a conversation
    keep: tuple[Condition, ...] = ()  # rows that do not meet all of these are left out
    row_reader: RowForm | None = None  # None: a row is read as it is
    choices: Choices | None = None
    split_hubs: Mapping[str, str] = field(default_factory=dict)  # splits that are the only split of another set of the hub
    media_files: str | None = None  # what the folder media_data_dir must have, of a set whose images are files of their own
    grader: Grader | None = None  # None: the environment of the run
    prompt: str | None = None  # how a question is usually worded, with {question} where it goes; None: the question alone

    def find_split(self, split: str) -> tuple[str, str]:
        """Return the set of the hub that has a split, and the name of the split there."""
        return (self.split_hubs[split], "train") if split in self.split_hubs else (self.hub, split)
