"""Recorded data as tasks: conversations (SFT), preference pairs, and unpaired preferences (KTO).

Examples are read by index like ``strop.data.sources.source.Rows``, and their ids are the positions of records in the unsplit data, so
that a run resumes exactly. ``strop.extensions.recorded.layouts`` lists the supported columns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from strop.data.builtin_dataset import BuiltinDataset
from strop.data.messages import first_reply_index, join_text, last_message_text, parse_tools
from strop.data.sources.image_columns import IMAGES
from strop.data.sources.records import DataError, Indexed, Record, Records
from strop.data.sources.row_readers import keeps_row, select_rows
from strop.data.sources.shards import StreamedRecord
from strop.data.sources.source import DataSource, validate_rows, warn_once
from strop.data.sources.streamed import StreamedRecords, is_streamed
from strop.extensions.recorded.layouts import (
    CompletionPair,
    Layout,
    MessageTuple,
    UnpairedCompletion,
    find_conversation_layout,
    find_pair_layout,
    find_unpaired_layout,
    find_unread_keys,
)
from strop.extensions.recorded.raw_text import PackedTexts
from strop.types import Message, Messages, Task

logger = logging.getLogger(__name__)

TaskT = TypeVar("TaskT", bound=Task)
PartsT = TypeVar("PartsT")
ToolDefinitions = tuple[Mapping[str, Any], ...]  # shown by the chat template before the conversation
TOOLS = "tools"  # default column of tool definitions


@dataclass(frozen=True, kw_only=True)
class Conversation(Task):
    """A conversation whose assistant messages are trained on. ``question`` is the first prompt, ``answer`` the last reply."""

    former_names: ClassVar[tuple[str, ...]] = ("strop.data.examples:Conversation", "strop.data.recorded.examples:Conversation")

    messages: tuple[Message, ...]
    tools: ToolDefinitions = ()
    is_raw_text: bool = False  # a text without a prompt: one assistant message, not rendered by the chat template


@dataclass(frozen=True, kw_only=True)
class Preference(Task):
    """Two completions of a prompt. ``question`` is the last message of the prompt, ``answer`` that of the chosen completion."""

    former_names: ClassVar[tuple[str, ...]] = ("strop.data.examples:Preference", "strop.data.recorded.examples:Preference")

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    margin: float | None = None  # how much better the chosen completion is, 0 or more; None if unknown
    tools: ToolDefinitions = ()


@dataclass(frozen=True, kw_only=True)
class UnpairedPreference(Task):
    """A completion with a label. ``question`` is the last message of the prompt; ``answer`` that of a desirable completion, else empty."""

    former_names: ClassVar[tuple[str, ...]] = ("strop.data.examples:Judged", "strop.data.recorded.examples:UnpairedPreference")

    prompt: tuple[Message, ...]
    completion: tuple[Message, ...]
    desirable: bool
    tools: ToolDefinitions = ()


def conversations(source: DataSource) -> Sequence[Conversation]:
    """Return conversations, read lazily. Raises DataError for invalid data."""

    def make(id: str, parts: MessageTuple, tools: ToolDefinitions, metadata: dict[str, Any]) -> Conversation:
        question = last_message_text(_prompt_messages(parts), "user")
        answer = last_message_text(parts, "assistant")
        raw = source.text_key is not None
        return Conversation(
            id=id, question=question, answer=answer, metadata=metadata, messages=parts, tools=tools, is_raw_text=raw
        )

    builtin, records = source.open_records()
    if source.text_key is not None and source.characters_per_sample is not None:
        if isinstance(records, StreamedRecords):
            raise DataError(
                f"characters_per_sample is {source.characters_per_sample}, but {records.name} is streamed, and samples of several "
                "texts need the lengths of all; set streaming=false, or characters_per_sample to null"
            )
        records = PackedTexts(records, source.text_key, source.characters_per_sample)
    layout = find_conversation_layout(source, builtin, records)
    return _load_examples(source, builtin, records, layout, _prompt_messages, make)


def preferences(source: DataSource) -> Sequence[Preference]:
    """Return preference pairs, read lazily. Skips ties, with a warning. Raises DataError."""

    def make(id: str, parts: CompletionPair, tools: ToolDefinitions, metadata: dict[str, Any]) -> Preference:
        question, answer = last_message_text(parts.prompt, "user"), last_message_text(parts.chosen, "assistant")
        return Preference(id=id, question=question, answer=answer, metadata=metadata, tools=tools, **vars(parts))

    builtin, records = source.open_records()
    layout = find_pair_layout(source, builtin, records)
    return _load_examples(source, builtin, records, layout, lambda pair: pair.prompt, make)


def unpaired_preferences(source: DataSource) -> Sequence[UnpairedPreference]:
    """Return unpaired preferences, read lazily. Raises DataError.

    A pair becomes two, next to each other: a desirable completion (chosen) and an undesirable one (rejected). ``size`` then counts pairs.
    """

    def make(id: str, parts: UnpairedCompletion, tools: ToolDefinitions, metadata: dict[str, Any]) -> UnpairedPreference:
        answer = last_message_text(parts.completion, "assistant") if parts.desirable else ""
        question = last_message_text(parts.prompt, "user")
        return UnpairedPreference(id=id, question=question, answer=answer, metadata=metadata, tools=tools, **vars(parts))

    builtin, records = source.open_records()
    layout = find_unpaired_layout(source, builtin, records)
    if layout is None:
        pairs = preferences(source)
        return pairs.expand(2, take_side) if is_streamed(pairs) else PairsAsUnpaired(pairs)
    return _load_examples(source, builtin, records, layout, lambda parts: parts.prompt, make)


def _load_examples(
    source: DataSource,
    builtin: BuiltinDataset,
    records: Records,
    layout: Layout[PartsT],
    get_prompt: Callable[[PartsT], Messages],
    make: Callable[[str, PartsT, ToolDefinitions, dict[str, Any]], TaskT],
) -> Sequence[TaskT]:
    """Return the examples of ``records``; for a built-in set, only those that it uses.

    ``get_prompt`` returns the prompt, used to keep questions from being both trained on and held out.
    """
    template = source.load_template()
    tool_key = source.tool_key or TOOLS
    if unread := find_unread_keys(source, layout):
        warn_once(f"{records.name}: {', '.join(unread)} is not read: the columns that are read are {sorted(layout.columns)}")

    def read(index: int) -> TaskT:
        return read_record(records[index], f"{records.name}:{index}", records.location(index))

    def read_record(record: Record, id: str, where: str) -> TaskT:
        metadata = {key: value for key, value in record.items() if key not in layout.columns and key not in (tool_key, IMAGES)}
        if source.tool_key is not None and tool_key not in record:
            raise DataError(f"{where} has no key {tool_key!r}, which tool_key names; it has {sorted(record)}")
        tools = parse_tools(record.get(tool_key), f"{where}: {tool_key!r}")
        return make(id, layout.read(record, template, where), tools, metadata)

    def questions() -> Iterator[str]:
        for index in selected:
            yield join_text(get_prompt(layout.read(records[index], template, records.location(index))))

    def is_example(record: StreamedRecord) -> bool:
        content = record.read()
        return keeps_row(builtin.keep, content) and layout.is_example(content, record.where)

    if isinstance(records, StreamedRecords):
        return source.stream(
            records,
            lambda record, _: read_record(record.read(), record.id, record.where),
            lambda record: join_text(get_prompt(layout.read(record.read(), template, record.where))),
            is_example if layout.skips or builtin.keep else None,
        )
    kept = select_rows(builtin, records)
    selected = layout.example_indices(records)
    if not selected:
        raise DataError(f"none of the {len(records)} records of {records.name!r} prefers one of its responses")
    if skipped := len(records) - len(selected):
        logger.warning("%d of %d records of %s %s and are skipped", skipped, len(records), records.name, layout.not_examples)
    if len(kept) < len(records):
        selected = sorted(set(selected) & set(kept))
    examples = Examples(read=read, indices=source.select_records(selected, questions), repeat=source.repeat, num_skipped=skipped)
    validate_rows(examples, len(examples.indices), records)
    return examples


def _prompt_messages(conversation: MessageTuple) -> MessageTuple:
    return conversation[: first_reply_index(conversation)]


@dataclass(frozen=True, kw_only=True)
class Examples(Indexed[TaskT]):
    """Examples by position, in record order, repeated ``repeat`` times."""

    read: Callable[[int], TaskT]  # the example of a record
    indices: Sequence[int]
    repeat: int
    num_skipped: int = 0  # number of records that are not examples

    def __len__(self) -> int:
        return len(self.indices) * self.repeat

    def item(self, index: int) -> TaskT:
        return self.read(self.indices[index % len(self.indices)])


@dataclass(frozen=True)
class PairsAsUnpaired(Indexed[UnpairedPreference]):
    """Preference pairs as unpaired preferences: position 2i is the chosen completion of pair i, 2i + 1 the rejected one."""

    pairs: Sequence[Preference]

    def __len__(self) -> int:
        return 2 * len(self.pairs)

    def item(self, index: int) -> UnpairedPreference:
        return take_side(self.pairs[index // 2], index % 2)


def take_side(pair: Preference, side: int) -> UnpairedPreference:
    """Return the chosen completion of a pair (side 0), or the rejected one (side 1)."""
    return UnpairedPreference(
        id=f"{pair.id}:{'rejected' if side else 'chosen'}",
        question=pair.question,
        answer="" if side else pair.answer,
        metadata=pair.metadata,
        prompt=pair.prompt,
        completion=pair.rejected if side else pair.chosen,
        desirable=not side,
        tools=pair.tools,
    )


EXAMPLE_READERS: Mapping[str, Callable[[DataSource], Sequence[Any]]] = {  # by an algorithm's ``recorded_data``
    "conversations": conversations,
    "preferences": preferences,
    "judgements": unpaired_preferences,
}
