"""Recorded data as tasks: conversations to imitate, pairs of which one is better, completions that were judged.

They are read by index like ``strop.data.source.Rows``, and their ids follow from a record's place in the unsplit data: a run resumes
exactly. What columns are understood is in ``strop.data.layouts``.
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
    """What the assistant says in it is taught. ``question`` is what it is first asked, ``answer`` what it says last."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, kw_only=True)
class Preference(Task):
    """Two completions of one prompt. ``question`` ends the prompt, ``answer`` ends the chosen completion."""

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    margin: float | None = None  # by how much the chosen one is better, 0 or more; None: the data does not say


@dataclass(frozen=True, kw_only=True)
class Judged(Task):
    """A completion of a prompt with a verdict. ``question`` ends the prompt; ``answer`` ends a desirable completion, and is empty else."""

    prompt: tuple[Message, ...]
    completion: tuple[Message, ...]
    desirable: bool


def conversations(source: DataSource) -> Sequence[Conversation]:
    """Conversations, read when they are asked for. Raises DataError for data that cannot be used."""

    def make(id: str, parts: Turns, metadata: dict[str, Any]) -> Conversation:
        question = last_text(_asked(parts), "user")
        return Conversation(id=id, question=question, answer=last_text(parts, "assistant"), metadata=metadata, messages=parts)

    builtin, records = source.open()
    return _examples(source, records, conversation_layout(source, builtin, records), _asked, make)


def preferences(source: DataSource) -> Sequence[Preference]:
    """Pairs, read when they are asked for; those that prefer neither are left out, with their number in a warning. Raises DataError."""

    def make(id: str, parts: Pair, metadata: dict[str, Any]) -> Preference:
        question, answer = last_text(parts.prompt, "user"), last_text(parts.chosen, "assistant")
        return Preference(id=id, question=question, answer=answer, metadata=metadata, **vars(parts))

    builtin, records = source.open()
    return _examples(source, records, pair_layout(source, builtin, records), lambda pair: pair.prompt, make)


def judged(source: DataSource) -> Sequence[Judged]:
    """Judged completions, read when they are asked for. Raises DataError.

    A pair gives two: its chosen completion is desirable and its rejected one is not. They stand next to each other; ``size`` counts
    pairs then.
    """

    def make(id: str, parts: Verdict, metadata: dict[str, Any]) -> Judged:
        answer = last_text(parts.completion, "assistant") if parts.desirable else ""
        return Judged(id=id, question=last_text(parts.prompt, "user"), answer=answer, metadata=metadata, **vars(parts))

    builtin, records = source.open()
    layout = verdict_layout(source, builtin, records)
    if layout is None:
        return BothSides(preferences(source))
    return _examples(source, records, layout, lambda verdict: verdict.prompt, make)


def _examples(
    source: DataSource,
    records: Records,
    layout: Layout[PartsT],
    asked: Callable[[PartsT], Messages],
    make: Callable[[str, PartsT, dict[str, Any]], TaskT],
) -> Examples[TaskT]:
    """``asked``: what an example's parts ask, so that no question is both trained on and held out."""
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
        raise DataError(f"none of the {len(records)} records of {records.name!r} says which of its responses is better")
    if left_out := len(records) - len(kept):
        logger.warning("%d of %d records of %s prefer neither response and are left out", left_out, len(records), records.name)
    examples = Examples(read=read, indices=source.select(kept, questions), repeat=source.repeat, left_out=left_out)
    look_at(examples, len(examples.indices), records)
    return examples


def _asked(conversation: Turns) -> Turns:
    return conversation[: first_reply(conversation)]


def _as_text(messages: Messages) -> str:
    return "\0".join(text for message in messages for text in (message.role, message.content))


@dataclass(frozen=True, kw_only=True)
class Examples(Sequence[TaskT]):
    """Examples by position, in the order of their records, ``repeat`` times over."""

    read: Callable[[int], TaskT]  # the example of a record
    indices: Sequence[int]
    repeat: int
    left_out: int = 0  # records that are no example

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
    """Each pair as two judged completions: at 2i the chosen one, at 2i + 1 the rejected one."""

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
