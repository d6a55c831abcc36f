"""Data sources: the options of one entry of a configuration's ``data`` section, and the selected rows."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from string import ascii_uppercase
from typing import Any, Literal, TypeVar

from strop.data.builtin_dataset import BuiltinDataset, Choices, Purpose
from strop.data.builtin_sets import BUILTIN_DATASETS
from strop.data.data_config import DataEntryConfig, list_unread_keys
from strop.data.messages import get_prompt_text, get_text_or_messages, last_message_text
from strop.data.prompt_template import AUTO_PROMPT, PromptTemplate, parse_prompt_template, read_prompt_file
from strop.data.sources.dataset_class import (
    call_dataset_class,
    choose_arguments,
    choose_split,
    find_dataset_class,
    is_dataset_class,
    open_made_rows,
)
from strop.data.sources.files import FILE_SUFFIXES, is_url, open_file
from strop.data.sources.image_columns import IMAGES, ImageColumns, read_images
from strop.data.sources.in_memory import open_rows
from strop.data.sources.records import (
    DataError,
    Indexed,
    Record,
    Records,
    get_text,
    get_value,
    has_key,
    is_held_out,
    split_by_question,
    stable_hash,
)
from strop.data.sources.row_readers import keeps_row, read_rows, select_rows
from strop.data.sources.shards import StreamedRecord, find_shards, is_pattern, list_shards
from strop.data.sources.streamed import RecordStream, StreamBlocks, Streamed, StreamedRecords
from strop.types import Message
from strop.user_code import suggest_names

T = TypeVar("T")
Part = Literal["train", "validation"]  # parts of the entry divided by ``split_validation_size``

log = logging.getLogger(__name__)

MOST_SETS = 12  # built-in sets listed by a message
HUB_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*/[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A prompt with its reference answer."""

    id: str
    prompt: str | tuple[Message, ...]  # a question, or a conversation to continue
    answer: str  # empty for data without answers
    metadata: Mapping[str, Any] = field(default_factory=dict)  # the whole record, without its images
    images: tuple[str, ...] = ()  # of a question, as references; a conversation's images are in its messages

    @property
    def question(self) -> str:
        """The question, or the user's last message in the conversation."""
        return self.prompt if isinstance(self.prompt, str) else last_message_text(self.prompt, "user")


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A dataset (file, hub name, built-in name, or rows in memory), the part of it to use, and its prompt options.

    Environments that generate their tasks use ``size``, ``seed``, ``part`` and the prompt options.
    """

    dataset_name: str | None = None  # a .jsonl/.json/.csv/.parquet/.arrow file, a built-in name, OWNER/NAME on the hub, or code
    dataset_kwargs: Mapping[str, Any] = field(
        default_factory=dict, hash=False
    )  # arguments of a class or function that makes rows
    rows: Sequence[Record] | None = field(default=None, repr=False)  # instead of dataset_name: list of dicts or datasets.Dataset
    rows_of: BuiltinDataset | None = field(default=None, repr=False)  # the built-in set these rows belong to
    subset: str | None = None  # the hub's configuration name
    split: str | None = None  # default: the built-in's, else "train"
    revision: str | None = None  # of the hub: a commit, a tag or a branch; default: the built-in's, else the newest
    input_key: str | None = None  # default: the built-in's, else "problem", else "prompt"; may be dotted: prompt.0.content
    output_key: str | None = None  # default: the built-in's, else "answer", else "solution" or "completion"
    messages_key: str | None = None  # recorded data: a column of conversations; default: messages, or conversations
    text_key: str | None = None  # recorded data: a column of raw text, which is trained on without a prompt
    characters_per_sample: int | None = None  # raw text: rows are joined up to this length; default: one row
    chosen_key: str | None = None  # pairs: the better completion; default: chosen
    rejected_key: str | None = None  # pairs: the worse completion; default: rejected
    label_key: str | None = None  # unpaired preferences: whether the completion is desirable; default: label
    system_key: str | None = None  # recorded data: a system prompt to put before the messages
    tool_key: str | None = None  # recorded data: definitions of tools; default: tools, if present
    margin_key: str | None = None  # pairs: margin of the chosen completion; default: margin, if present
    image_key: str | None = None  # images of a record; default: images, or image, where it holds images
    media_data_dir: str | None = None  # folder of images; default: working directory or the data file's folder
    prompt_file: str | None = (
        None  # text with {question} (or {}) where the question goes; auto: as the built-in set is usually worded
    )
    system_prompt: str | None = None
    system_prompt_file: str | None = None
    size: int | None = None  # use at most this many rows; the number of generated tasks
    repeat: int = 1  # repeat every row (for validation on few questions)
    shuffle_choices: bool = False  # of multiple-choice questions, by seed and question
    seed: int = 42  # of generated tasks, the held-out rows and shuffled options
    split_validation_size: float = 0.0  # rows to hold out: below 1 a fraction, from 1 on a number
    part: Part | Literal["all"] = "all"  # of the validation split
    purpose: Purpose = "train"  # chooses the split of a built-in set
    streaming: bool = False
    shuffle_buffer: int = 10_000  # rows of a streamed block
    shuffle: bool = False  # shuffles a stream's shards, and rows within blocks
    in_memory: bool = False  # read the first ``size`` rows of a stream once, into memory
    opened: tuple[BuiltinDataset, Records] | None = field(default=None, repr=False, compare=False)  # by strop data check

    def __post_init__(self) -> None:
        if self.dataset_name is not None and self.rows is not None:
            raise DataError(f"dataset_name is {self.dataset_name!r}, and rows is set too; keep one")
        if self.system_prompt is not None and self.system_prompt_file is not None:
            raise DataError("system_prompt and system_prompt_file are both set; keep one")
        if self.text_key is None and self.characters_per_sample is not None:
            raise DataError("characters_per_sample is set, but only raw text is joined; set text_key to its column")
        if self.text_key is not None and (
            self.system_prompt or self.system_prompt_file or self.prompt_file not in (None, AUTO_PROMPT)
        ):
            raise DataError(
                "text_key names raw text, which has no prompt; set prompt_file, system_prompt and system_prompt_file to null"
            )
        if self.size is not None and self.size < 1:
            raise DataError(f"size is {self.size}; it must be at least 1, or null for all rows")
        if self.repeat < 1:
            raise DataError(f"repeat is {self.repeat}; it must be at least 1")
        if self.split_validation_size < 0:
            raise DataError(f"split_validation_size is {self.split_validation_size}; it must be 0 (off) or positive")

    @classmethod
    def from_entry(
        cls, entry: DataEntryConfig, *, seed: int, part: Part, purpose: Purpose | None = None, shuffle: bool = False
    ) -> DataSource:
        """Return the source of an entry's rows: of one ``part`` if the entry holds out a validation split, otherwise of all rows.

        Generated tasks, which have no rows to split, always belong to one part.

        ``seed``: the run's, for an entry without its own. ``purpose``: by default that of the part; both parts of a split entry
        come from its training split. ``shuffle``: for streams; other data is shuffled by its reader.
        """
        generated = entry.dataset_name is None and entry.rows is None
        others = {"rows_of", "seed", "part", "purpose", "shuffle", "in_memory", "opened"}
        keys = {field.name for field in fields(cls)} - others  # all others are also keys of an entry
        return cls(
            **{key: getattr(entry, key) for key in keys},
            seed=seed if entry.seed is None else entry.seed,
            part=part if entry.split_validation_size or generated else "all",
            purpose="train" if entry.split_validation_size else purpose or part,
            shuffle=shuffle,
            in_memory=part == "validation",
        )

    @property
    def is_made_by_code(self) -> bool:
        """Whether a user's class or function creates the rows."""
        return self.dataset_name is not None and is_dataset_class(self.dataset_name)

    @property
    def held_out(self) -> bool:
        """Whether generated tasks must come from the held-out part."""
        return self.part == "validation" or (self.part == "all" and self.split in ("validation", "test"))

    def load_template(self) -> PromptTemplate:
        """Load the prompt template. Raises DataError if a file is missing or has no placeholder for the question."""
        file = self.system_prompt_file
        system_prompt = read_prompt_file(file, "system_prompt_file").strip() if file else self.system_prompt
        builtin = self.rows_of or BUILTIN_DATASETS.get(self.dataset_name or "")
        if self.prompt_file == AUTO_PROMPT and builtin is not None and builtin.prompt is not None:
            return parse_prompt_template(builtin.prompt, f"of {self.dataset_name}", system_prompt)
        if self.prompt_file in (None, AUTO_PROMPT):
            return PromptTemplate(system=system_prompt)
        text = read_prompt_file(self.prompt_file, "prompt_file")
        if builtin is not None and builtin.choices is not None and "{question}" not in text and "{}" not in text:
            return PromptTemplate(f"{text}\n\n", system=system_prompt)  # an instruction, above the question and its options
        return parse_prompt_template(text, repr(self.prompt_file), system_prompt)

    def load_rows(self, *, needs_answers: bool = True) -> Sequence[Row]:
        """Return the rows, read lazily. Raises DataError for invalid data; answers may be missing if ``needs_answers`` is false."""
        builtin, records = self.open_records()
        own_input, own_output = self.input_key, self.output_key
        if (messages := self._find_messages(records)) is not None and has_key(records[0], f"{messages}.1"):
            own_input, own_output = f"{messages}.0.content", f"{messages}.1.content"  # of a question and its answer
        elif self.messages_key is not None:
            warn_once(
                f"{records.name}: messages_key={self.messages_key} is not read, because it has no question and answer in the first row"
            )
        input_key = own_input or _find_column(records, "input_key", builtin.input_key, ("prompt",))
        output_key = own_output or _find_column(records, "output_key", builtin.output_key, ("solution", "completion"))
        has_answers = needs_answers or own_output is not None or has_key(records[0], output_key)
        if not has_answers and output_key:
            warn_once(
                f"{records.name} has no column {output_key!r}: task.answer is empty; set output_key to the reference answer"
            )
        reader = RowReader(
            input_key=input_key,
            output_key=output_key if has_answers else None,
            answer_marker=builtin.answer_marker,
            choices=builtin.choices,
            choices_seed=self.seed if self.shuffle_choices else None,
        )
        if isinstance(records, StreamedRecords):
            return self.stream(
                records,
                lambda record, _: reader.read(record.read(), record.id, record.where),
                lambda record: get_prompt_text(record.read(), input_key, "input_key", record.where),
                (lambda record: keeps_row(builtin.keep, record.read())) if builtin.keep else None,
            )
        indices = select_rows(builtin, records)
        rows = Rows(
            records=records,
            indices=self.select_records(indices, lambda: records.iter_column(input_key, "input_key", get_prompt_text, indices)),
            repeat=self.repeat,
            reader=reader,
        )
        validate_rows(rows, len(rows.indices), records)
        return rows

    def stream(
        self,
        records: StreamedRecords,
        make: Callable[[StreamedRecord, int], T],
        question: Callable[[StreamedRecord], str],
        is_example: Callable[[StreamedRecord], bool] | None = None,
    ) -> Sequence[T]:
        """Return the converted records of this part, at most ``size`` per epoch. Raises DataError if the first is invalid.

        ``question(record)`` returns a record's question, which decides whether it is held out; ``is_example``: which records
        count.
        """

        def keep(record: StreamedRecord) -> bool:
            try:
                if is_example is not None and not is_example(record):
                    return False
                held_out = divided and is_held_out(question(record), self.split_validation_size, self.seed)
            except DataError:  # raised again, and counted, when it is its turn in training
                held_out = False
            return not divided or held_out == (self.part == "validation")

        divided = self.part != "all" and self.split_validation_size > 0
        if self.in_memory and self.size is None:
            raise DataError(f"{records.name} is streamed, and all of its rows would be read into memory here; set size")
        if divided and self.split_validation_size >= 1:
            raise DataError(
                f"split_validation_size is {self.split_validation_size:g}, but {records.name} is streamed; set a fraction below 1"
            )
        blocks = StreamBlocks(
            records.stream,
            rows=self.shuffle_buffer,
            seed=self.seed if self.shuffle else None,
            keep=keep if divided or is_example is not None else None,
            limit=self.size,
            copies=self.repeat,
        )
        items = Streamed(blocks, make)
        if is_example is None or is_example(records.first):
            make(records.first, 0)
        return items.read_epoch() if self.in_memory else items

    def _find_messages(self, records: Records) -> str | None:
        """Return the column of conversations to read rows from.

        A dataset class may have read ``input_key`` itself and need not name it."""
        if self.messages_key is not None or not self.is_made_by_code:
            return self.messages_key
        columns = ("problem", "prompt") if self.input_key is None else (self.input_key,)
        return None if any(has_key(records[0], key) for key in columns) else "messages"

    def select_records(self, indices: Sequence[int], questions: Callable[[], Iterable[str]]) -> Sequence[int]:
        """Select the records of this part from ``indices``, at most ``size``. ``questions()`` yields the question of each."""
        if self.part != "all" and self.split_validation_size:
            train, validation = split_by_question(questions(), self.split_validation_size, self.seed)
            indices = [indices[index] for index in (train if self.part == "train" else validation)]
        return indices[: self.size]

    def _open_made_rows(self, name: str) -> Records:
        """Open the rows created by a class or a function. The held-out rows are chosen here, by their question."""
        made = call_dataset_class(name, self._list_keys(), self.dataset_kwargs, self.purpose)
        if self.streaming:
            return StreamedRecords(RecordStream(name, list_shards(name, choose_split(name, made, self.split, self.purpose))))
        return open_made_rows(name, made, self.split, self.purpose)

    def check_arguments(self) -> None:
        """Raise DataError if the class or function that creates the rows cannot be imported or called with these keys."""
        name = str(self.dataset_name)
        choose_arguments(name, find_dataset_class(name), self._list_keys(), self.dataset_kwargs, self.purpose)

    def _list_keys(self) -> dict[str, Any]:
        """Return the keys of the entry that row-creating code may take as parameters."""
        ours = ("shuffle", "in_memory", "dataset_kwargs", "rows", "part", "purpose", "split_validation_size", "repeat", "opened")
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ours}

    def open_records(self) -> tuple[BuiltinDataset, Records]:
        """Open the dataset. Return the built-in defaults for its name, and its records with images read. Raises DataError."""
        if self.opened is not None:
            return self.opened
        builtin, records = self._open_records()
        return builtin, self.read_images(records)

    def read_images(self, records: Records) -> Records:
        """Return the records of this source with their images read."""
        name = self.dataset_name or ""
        beside = str(Path(name).parent) if self.rows is None and is_local(name) else None
        return read_images(records, ImageColumns(self.image_key, self.media_data_dir, beside))

    def _open_records(self) -> tuple[BuiltinDataset, Records]:
        if self.rows is not None:
            builtin = self.rows_of or BuiltinDataset("")
            return builtin, read_rows(builtin, self._open_rows(self.rows), self.media_data_dir)
        name = self.dataset_name
        if name is None:
            raise DataError("dataset_name is not set, but a dataset is needed here; set it to a file or a dataset of the hub")
        if name in BUILTIN_DATASETS:
            builtin = BUILTIN_DATASETS[name]
        elif is_local(name) or (self.streaming and is_pattern(name)):
            return BuiltinDataset(""), self._open_file(name)
        elif is_dataset_class(name):
            return BuiltinDataset(""), self._open_made_rows(name)
        else:
            check_hub_name(name)
            builtin = BuiltinDataset(name)
        from strop.data.sources.hub import choose_files, open_hub

        split = self.split or builtin.splits.choose(self.purpose)
        subset, revision = self.subset or builtin.subset, self.revision or builtin.revision
        files, (hub, split) = choose_files(builtin, subset), builtin.find_split(split)
        records = open_hub(hub, subset, split, revision, files, streaming=self.streaming)
        return builtin, read_rows(builtin, records, self.media_data_dir)

    def _open_rows(self, rows: Any) -> Records:
        return StreamedRecords(RecordStream("rows", list_shards("rows", rows))) if self.streaming else open_rows(rows)

    def _open_file(self, name: str) -> Records:
        if unread := list_unread_keys(self):
            key, value = next(iter(unread.items()))
            raise DataError(f"{key} is {value}, but {name} is a file, of which all rows are read; set it to null")
        return StreamedRecords(RecordStream(name, find_shards(name))) if self.streaming else open_file(Path(name))


def is_local(name: str) -> bool:
    """Return whether a data set name is a local file or folder, existing or not."""
    try:
        return not is_url(name) and (Path(name).suffix in FILE_SUFFIXES or os.path.exists(name))
    except (OSError, ValueError):  # not a valid file name
        return False


def check_hub_name(name: str) -> None:
    """Raise DataError for a name that is valid neither on the hub nor as a file URL."""
    if is_url(name) or HUB_NAME.fullmatch(name):
        return
    known = [
        each for each in BUILTIN_DATASETS if not each.startswith(("mmlu_", "mmmlu_")) or name.startswith(("mmlu", "mmmlu"))
    ]  # one language is enough
    unexpanded = "; ${oc.env:NAME} reads an environment variable" if "$" in name else ""
    near = suggest_names(name, known, MOST_SETS)
    raise DataError(f"{name!r} is not a file, not an OWNER/NAME of the hub and not a built-in dataset{near}{unexpanded}")


def validate_rows(rows: Sequence[object], count: int, records: Records) -> None:
    """Read the first ``count`` rows, or only one of uniform records, so that errors are raised before the run starts."""
    if records.lenient:
        return
    for index in range(1 if records.uniform else count):
        rows[index]


def _find_column(records: Records, option: str, default: str, usual: Sequence[str]) -> str:
    """Return ``default``; if the first record lacks it and has one of the ``usual`` columns, that one, with a warning."""
    found = [key for key in usual if has_key(records[0], key)]
    if has_key(records[0], default) or len(found) != 1:
        return default
    warn_once(f"{records.name} has no column {default!r}: {found[0]!r} is used instead; set {option}={found[0]}")
    return found[0]


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning only once, for training and validation on the same data."""
    log.warning("%s", message)


@dataclass(frozen=True, kw_only=True)
class Rows(Indexed[Row]):
    """Rows of ``records`` by position, in file order, repeated ``repeat`` times."""

    records: Records
    indices: Sequence[int]
    repeat: int
    reader: RowReader

    def __len__(self) -> int:
        return len(self.indices) * self.repeat

    def item(self, position: int) -> Row:
        index = self.indices[position % len(self.indices)]
        # The id is the position in the unsplit data: the same in every run.
        return self.reader.read(self.records[index], f"{self.records.name}:{index}", self.records.location(index))


@dataclass(frozen=True, kw_only=True)
class RowReader:
    """Reads a row from the columns of a record."""

    input_key: str
    output_key: str | None  # None: without answers
    answer_marker: str | None
    choices: Choices | None = None
    choices_seed: int | None = None  # None: the options stay in order

    def read(self, record: Record, id: str, where: str) -> Row:
        """Return the row of a record. Raises DataError."""
        answer = "" if self.output_key is None else get_text(record, self.output_key, "output_key", where)
        if self.answer_marker is not None:
            answer = answer.rpartition(self.answer_marker)[2].strip()
        prompt = get_text_or_messages(record, self.input_key, "input_key", where)
        if isinstance(prompt, str) and not prompt.strip():
            raise DataError(f"{where}: {self.input_key!r} is empty; a row needs a question")
        if self.choices is not None and isinstance(prompt, str):
            prompt, answer, shown = read_choices(self.choices, record, prompt, answer, where, self.choices_seed)
            record = {**record, "choices": shown}
        images = tuple(record.get(IMAGES) or ()) if isinstance(prompt, str) else ()
        metadata = {key: value for key, value in record.items() if key != IMAGES}
        return Row(id=id, prompt=prompt, answer=answer, metadata=metadata, images=images)


# Multiple-choice questions: options as text below the question, and the letter of the right one.


def read_choices(
    choices: Choices, record: Record, question: str, answer: str, where: str, seed: int | None = None
) -> tuple[str, str, list[str]]:
    """Return the question with its options, the letter of the right one, and the options as shown.

    ``seed``: shuffle the options by seed and question; None keeps their order, unless the right option would come first.
    """
    options = _read_options(choices, record, where)
    order = list(range(len(options)))
    if seed is not None or choices.first_is_correct:
        correct = 0 if choices.first_is_correct else _read_letter(answer, options, where)
        Random(stable_hash(question, seed or 0)).shuffle(order)
        answer = ascii_uppercase[order.index(correct)]
    shown = [options[index] for index in order]
    lines = [f"{letter}) {option}" for letter, option in zip(ascii_uppercase, shown, strict=False)]
    return "\n".join([f"Question: {question}", "Options:", *lines]), answer, shown


def _read_letter(answer: str, options: list[str], where: str) -> int:
    letter = answer.strip().upper()
    if len(letter) != 1 or letter not in ascii_uppercase[: len(options)]:
        raise DataError(
            f"{where}: the answer is {answer!r:.80}, not the letter of one of its {len(options)} options. Fix the record, or set "
            "shuffle_choices to false"
        )
    return ascii_uppercase.index(letter)


def _read_options(choices: Choices, record: Record, where: str) -> list[str]:
    if len(choices.options) > 1:
        return [_read_option(record, column, where) for column in choices.options]
    options = get_value(record, choices.options[0], "dataset_name", where)
    if not isinstance(options, list | tuple) or not 0 < len(options) <= len(ascii_uppercase):
        raise DataError(f"{where}: {choices.options[0]!r} is {options!r:.80}, not a list of up to 26 options. Fix the record")
    return [str(option) for option in options]


def _read_option(record: Record, column: str, where: str) -> str:
    """Return the option in a column. CSV files of the hub are read by pandas, which treats the option "None" as missing."""
    value = get_value(record, column, "dataset_name", where)
    if isinstance(value, bool) or value is None:  # a column with only "True" and "False"
        return str(value)
    return get_text(record, column, "dataset_name", where)
