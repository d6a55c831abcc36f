"""Recorded data as tasks: conversations (SFT), preference pairs, and unpaired preferences (KTO).

Examples are read by index like ``strop.data.source.Rows``, and their ids are the positions of records in the unsplit data, so that a run
resumes exactly. ``strop.data.layouts`` lists the supported columns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from strop.data.errors import DataError
from strop.data.layouts import Layout, Pair, Turns, Verdict, conversation_layout, pair_layout, verdict_layout
from strop.data.messages import first_reply, last_text
from strop.data.records import Records
from strop.data.source import DataSource, look_at
from strop.types import Message, Messages, Task

logger = logging.getLogger(__name__)

TaskT = TypeVar("TaskT", bound=Task)
PartsT = TypeVar("PartsT")


@dataclass(frozen=True, kw_only=True)
class Conversation(Task):
    """A conversation whose assistant messages are trained on. ``question`` is the first prompt, ``answer`` the last reply."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, kw_only=True)
class Preference(Task):
    """Two completions of a prompt. ``question`` is the last message of the prompt, ``answer`` that of the chosen completion."""

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    margin: float | None = None  # by how much the chosen completion is better, 0 or more; None if unknown


@dataclass(frozen=True, kw_only=True)
class Judged(Task):
    """A completion with a label. ``question`` is the last message of the prompt; ``answer`` that of a desirable completion, else empty."""

    prompt: tuple[Message, ...]
    completion: tuple[Message, ...]
    desirable: bool


def conversations(source: DataSource) -> Sequence[Conversation]:
    """Return conversations, read lazily. Raises DataError for invalid data."""

    def make(id: str, parts: Turns, metadata: dict[str, Any]) -> Conversation:
        question = last_text(_asked(parts), "user")
        return Conversation(id=id, question=question, answer=last_text(parts, "assistant"), metadata=metadata, messages=parts)

    builtin, records = source.open()
    return _examples(source, records, conversation_layout(source, builtin, records), _asked, make)


def preferences(source: DataSource) -> Sequence[Preference]:
    """Return preference pairs, read lazily. Skips those that prefer neither response, with a warning. Raises DataError."""

    def make(id: str, parts: Pair, metadata: dict[str, Any]) -> Preference:
        question, answer = last_text(parts.prompt, "user"), last_text(parts.chosen, "assistant")
        return Preference(id=id, question=question, answer=answer, metadata=metadata, **vars(parts))

    builtin, records = source.open()
    return _examples(source, records, pair_layout(source, builtin, records), lambda pair: pair.prompt, make)


def judged(source: DataSource) -> Sequence[Judged]:
    """Return unpaired preferences, read lazily. Raises DataError.

    A pair becomes two, next to each other: a desirable completion (chosen) and an undesirable one (rejected). ``size`` then counts pairs.
    """

    def make(id: str, parts: Verdict, metadata: dict[str, Any]) -> Judged:
        answer = last_text(parts.completion, "assistant") if parts.desirable else ""
        return Judged(id=id, question=last_text(parts.prompt, "user"), answer=answer, metadata=metadata, **vars(parts))

    builtin, records = source.open()
    layout = verdict_layout(source, builtin, records)
    if layout is None:
        return BothSides(preferences(source))
    return _examples(source, records, layout, lambda parts: parts.prompt, make)


def _examples(
    source: DataSource,
    records: Records,
    layout: Layout[PartsT],
    asked: Callable[[PartsT], Messages],
    make: Callable[[str, PartsT, dict[str, Any]], TaskT],
) -> Examples[TaskT]:
    """``get_prompt`` returns the prompt of an example, so that no question is both trained on and held out."""
    template = source.template()

    def read(index: int) -> TaskT:
        record = records[index]
        metadata = {key: value for key, value in record.items() if key not in layout.columns}
        return make(f"{records.name}:{index}", layout.read(record, template, records.where(index)), metadata)

    def questions() -> Iterator[str]:
        for index in kept:
            yield _as_text(asked(layout.read(records[index], template, records.where(index))))

    kept = layout.rows(records)
    if not kept:
        raise DataError(f"none of the {len(records)} records of {records.name!r} prefers one of its responses")
    if left_out := len(records) - len(kept):
        logger.warning("%d of %d records of %s prefer neither response and are skipped", left_out, len(records), records.name)
    examples = Examples(read=read, indices=source.select(kept, questions), repeat=source.repeat, left_out=left_out)
    look_at(examples, len(examples.indices), records)
    return examples


def _asked(conversation: Turns) -> Turns:
    return conversation[: first_reply(conversation)]


def _as_text(messages: Messages) -> str:
    return "\0".join(text for message in messages for text in (message.role, message.content))


@dataclass(frozen=True, kw_only=True)
class Examples(Sequence[TaskT]):
    """Examples by position, in record order, repeated ``repeat`` times."""

    read: Callable[[int], TaskT]  # the example of a record
    indices: Sequence[int]
    repeat: int
    left_out: int = 0  # records that are not examples

    def __len__(self) -> int:
        return len(self.indices) * self.repeat

    @overload
    def __getitem__(self, position: int) -> TaskT: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[TaskT]: ...
    def __getitem__(self, position: int | slice) -> TaskT | Sequence[TaskT]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        return self.read(self.indices[range(len(self))[position] % len(self.indices)])


@dataclass(frozen=True)
class BothSides(Sequence[Judged]):
    """Preference pairs as unpaired preferences: position 2i is the chosen completion of pair i, 2i + 1 the rejected one."""

    pairs: Sequence[Preference]

    def __len__(self) -> int:
        return 2 * len(self.pairs)

    @overload
    def __getitem__(self, position: int) -> Judged: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[Judged]: ...
    def __getitem__(self, position: int | slice) -> Judged | Sequence[Judged]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        place, side = divmod(range(len(self))[position], 2)
        pair = self.pairs[place]
        return Judged(
            id=f"{pair.id}:{'rejected' if side else 'chosen'}",
            question=pair.question,
            answer="" if side else pair.answer,
            metadata=pair.metadata,
            prompt=pair.prompt,
            completion=pair.rejected if side else pair.chosen,
            desirable=not side,
        )
