"""Data sources: the options of one entry of a configuration's ``data`` section, and the rows they select."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, overload

from strop.data.prompt_template import PromptTemplate, parse_prompt_template, read_text_file
from strop.data.sources.builtin import BUILTIN_DATASETS, BuiltinDataset
from strop.data.sources.files import SUFFIXES, open_file
from strop.data.sources.records import DataError, Records, suggest_names
from strop.data.sources.split import split_by_question


@dataclass(frozen=True, kw_only=True)
class Row:
    """A question with its reference answer. ``metadata`` has the other columns of the record."""

    id: str
    question: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A dataset (file, hub name or built-in name), the part of it to use, and its prompt options.

    Environments that generate their tasks use ``size``, ``seed``, ``part`` and the prompt options.
    """

    dataset_name: str | None = None  # a .jsonl/.json/.csv/.parquet file, a built-in name, or OWNER/NAME on the hub
    subset: str | None = None  # the hub's configuration name
    split: str | None = None  # default: the built-in's, else "train"
    input_key: str | None = None  # default: the built-in's, else "problem"; may be dotted: prompt.0.content
    output_key: str | None = None  # default: the built-in's, else "answer"
    messages_key: str | None = None  # recorded data: a column of conversations; default: messages, or conversations
    chosen_key: str | None = None  # pairs: the better completion; default: chosen
    rejected_key: str | None = None  # pairs: the worse completion; default: rejected
    label_key: str | None = None  # unpaired preferences: whether the completion is desirable; default: label
    margin_key: str | None = None  # pairs: by how much the chosen one is better; default: margin, if present
    prompt_file: str | None = None  # text with {question} (or {}) where the question goes
    system_prompt: str | None = None
    system_prompt_file: str | None = None
    size: int | None = None  # use at most this many rows; the number of generated tasks
    repeat: int = 1  # repeat every row (for validation on few questions)
    seed: int = 42  # of generated tasks, and of the held-out rows
    split_validation_size: float = 0.0  # rows to hold out: below 1 a fraction, from 1 on a number
    part: Literal["all", "train", "validation"] = "all"  # of the validation split

    def __post_init__(self) -> None:
        if self.system_prompt is not None and self.system_prompt_file is not None:
            raise DataError("system_prompt and system_prompt_file are both set; keep one")
        if self.size is not None and self.size < 1:
            raise DataError(f"size is {self.size}; it must be at least 1, or null for all rows")
        if self.repeat < 1:
            raise DataError(f"repeat is {self.repeat}; it must be at least 1")
        if self.split_validation_size < 0:
            raise DataError(f"split_validation_size is {self.split_validation_size}; it must be 0 (off) or positive")

    @property
    def held_out(self) -> bool:
        """Whether generated tasks must come from the part that is not trained on."""
        return self.part == "validation" or (self.part == "all" and self.split in ("validation", "test"))

    def load_template(self) -> PromptTemplate:
        """Load the prompt template. Raises DataError if a file is missing or has no placeholder for the question."""
        file = self.system_prompt_file
        system_prompt = read_text_file(file, "system_prompt_file").strip() if file else self.system_prompt
        if self.prompt_file is None:
            return PromptTemplate(system=system_prompt)
        text = read_text_file(self.prompt_file, "prompt_file").rstrip("\n")
        return parse_prompt_template(text, repr(self.prompt_file), system_prompt)

    def load_rows(self) -> Sequence[Row]:
        """Return the rows, read lazily. Raises DataError for invalid data."""
        builtin, records = self.open_records()
        question_key = self.input_key or builtin.input_key
        rows = Rows(
            records=records,
            indices=self.select_records(range(len(records)), lambda: records.iter_column(question_key, "input_key")),
            repeat=self.repeat,
            input_key=question_key,
            output_key=self.output_key or builtin.output_key,
            answer_marker=builtin.answer_marker,
        )
        validate_rows(rows, len(rows.indices), records)
        return rows

    def select_records(self, indices: Sequence[int], questions: Callable[[], Iterable[str]]) -> Sequence[int]:
        """Select the records of this part from ``indices``, at most ``size``. ``questions()`` yields the question of each."""
        if self.part != "all" and self.split_validation_size:
            train, validation = split_by_question(questions(), self.split_validation_size, self.seed)
            indices = [indices[index] for index in (train if self.part == "train" else validation)]
        return indices[: self.size]

    def open_records(self) -> tuple[BuiltinDataset, Records]:
        """Open the dataset. Return the defaults of its name, and its records. Raises DataError."""
        name = self.dataset_name
        if name is None:
            raise DataError("dataset_name is not set, but a dataset is needed here; set it to a file or a dataset of the hub")
        if name in BUILTIN_DATASETS:
            builtin = BUILTIN_DATASETS[name]
        elif Path(name).suffix in SUFFIXES or Path(name).exists():
            return BuiltinDataset(""), open_file(Path(name))
        elif name.count("/") == 1 and not name.startswith((".", "/", "~")):
            builtin = BuiltinDataset(name)
        else:
            raise DataError(
                f"{name!r} is not a file, not an OWNER/NAME of the hub and not a built-in dataset{suggest_names(name, BUILTIN_DATASETS)}"
            )
        from strop.data.sources.hub import open_hub

        return builtin, open_hub(builtin.hub, self.subset or builtin.subset, self.split or builtin.split)


def validate_rows(rows: Sequence[object], count: int, records: Records) -> None:
    """Read the first ``count`` rows, so that errors in them are raised before the run starts.

    The records of a JSON file may differ, so all are read. Tables have one schema, so the first row is enough.
    """
    for index in range(count if Path(records.name).suffix in (".jsonl", ".json") else 1):
        rows[index]


def split_train_validation(data: DataSource) -> tuple[DataSource, DataSource]:
    """Return the training and the validation part of ``split_validation_size``. No question is in both."""
    return replace(data, part="train"), replace(data, part="validation")


@dataclass(frozen=True, kw_only=True)
class Rows(Sequence[Row]):
    """Rows of ``records`` by position, in file order, repeated ``repeat`` times."""

    records: Records
    indices: Sequence[int]
    repeat: int
    input_key: str
    output_key: str
    answer_marker: str | None

    def __len__(self) -> int:
        return len(self.indices) * self.repeat

    @overload
    def __getitem__(self, position: int) -> Row: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[Row]: ...
    def __getitem__(self, position: int | slice) -> Row | Sequence[Row]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        index = self.indices[range(len(self))[position] % len(self.indices)]
        record = self.records[index]
        answer = self.records.get_text(index, self.output_key, "output_key")
        if self.answer_marker is not None:
            answer = answer.rpartition(self.answer_marker)[2].strip()
        used = {self.input_key.split(".")[0], self.output_key.split(".")[0]}
        return Row(
            id=f"{self.records.name}:{index}",  # the position in the unsplit data: the same in every run
            question=self._read_question(index),
            answer=answer,
            metadata={key: value for key, value in record.items() if key not in used},
        )

    def _read_question(self, index: int) -> str:
        question = self.records.get_text(index, self.input_key, "input_key")
        if not question.strip():
            raise DataError(f"{self.records.location(index)}: {self.input_key!r} is empty; a row needs a question")
        return question
