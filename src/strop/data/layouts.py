"""Column layouts of datasets with conversations, preference pairs or unpaired preferences: a record -> messages.

The layout of a dataset is determined once, from the keys that are set and the columns of its first record, and applies to all records,
so that no column changes its meaning within a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from strop.data.builtin import Builtin
from strop.data.errors import DataError
from strop.data.messages import (
    as_completion,
    as_prompt,
    first_reply,
    holds,
    messages_of,
    text_or_messages,
    up_to_last_reply,
    value_of,
)
from strop.data.records import Record, Records, text_of
from strop.data.source import DataSource
from strop.data.templates import Template
from strop.types import Message

Turns = tuple[Message, ...]
PartsT = TypeVar("PartsT", covariant=True)


class Layout(Protocol[PartsT]):
    """A column layout of examples with parts ``PartsT``."""

    @property
    def columns(self) -> frozenset[str]:
        """The columns that are read; the others become metadata."""
        ...

    def read(self, record: Record, template: Template, where: str) -> PartsT:
        """Return the parts of a record. Raises DataError with ``where`` as its location."""
        ...

    def rows(self, records: Records) -> Sequence[int]:
        """Return the indices of the records that are examples."""
        ...


@dataclass(frozen=True)
class Pair:
    """Two completions of one prompt."""

    prompt: Turns
    chosen: Turns
    rejected: Turns
    margin: float | None = None


@dataclass(frozen=True)
class Verdict:
    """A completion of a prompt, and whether it is desirable."""

    prompt: Turns
    completion: Turns
    desirable: bool


@dataclass(frozen=True)
class Column:
    key: str
    option: str  # the setting that names the key

    def text_or_messages(self, record: Record, where: str) -> str | Turns:
        return text_or_messages(record, self.key, self.option, where)

    def at(self, where: str) -> str:
        return f"{where}: {self.key!r}"


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Base class of layouts that read named columns. Every record is an example."""

    @property
    def columns(self) -> frozenset[str]:
        used = (value for value in vars(self).values() if isinstance(value, Column))
        return frozenset(column.key.split(".")[0] for column in used)

    def rows(self, records: Records) -> Sequence[int]:
        return range(len(records))


@dataclass(frozen=True, kw_only=True)
class MessageList(_Columns):
    """A conversation in one column."""

    messages: Column

    def read(self, record: Record, template: Template, where: str) -> Turns:
        at = self.messages.at(where)
        value = value_of(record, self.messages.key, self.messages.option, where)
        return checked(as_prompt(messages_of(value, at), template, at), at)


@dataclass(frozen=True, kw_only=True)
class QuestionAndAnswer(_Columns):
    """A prompt and its completion in two columns."""

    question: Column
    answer: Column

    def read(self, record: Record, template: Template, where: str) -> Turns:
        given = self.question.text_or_messages(record, where)
        answer = as_completion(self.answer.text_or_messages(record, where), _messages(given), self.answer.at(where))
        return checked((*as_prompt(given, template, self.question.at(where)), *answer), self.answer.at(where))


@dataclass(frozen=True, kw_only=True)
class Squad(_Columns):
    """SQuAD (1606.05250): a passage, a question on it, and answer spans, of which the first is trained on."""

    context: Column = Column("context", "input_key")
    question: Column = Column("question", "input_key")
    answers: Column = Column("answers", "output_key")

    def read(self, record: Record, template: Template, where: str) -> Turns:
        context, question = (text_of(record, column.key, column.option, where) for column in (self.context, self.question))
        if not holds(record, "answers.text.0"):
            raise DataError(
                f"{where}: 'answers' is {record.get('answers')!r:.80}, without a first text; remove questions that have no answer"
            )
        answer = as_completion(text_of(record, "answers.text.0", "output_key", where), (), where)
        return checked(
            (*as_prompt(f"{context}\n\n{question}", template, self.question.at(where)), *answer), self.answers.at(where)
        )


@dataclass(frozen=True, kw_only=True)
class ChosenAndRejected(_Columns):
    """The better and the worse completion, with the prompt in its own column, or as the common prefix of both."""

    prompt: Column | None
    chosen: Column
    rejected: Column
    margin: Column | None

    def read(self, record: Record, template: Template, where: str) -> Pair:
        chosen, rejected = (column.text_or_messages(record, where) for column in (self.chosen, self.rejected))
        given = self.prompt.text_or_messages(record, where) if self.prompt else None
        if _whole(chosen, given) and _whole(rejected, given):
            where_parts = f"{where}: {self.chosen.key!r} and {self.rejected.key!r}"
            given, chosen, rejected = _parted(_messages(chosen), _messages(rejected), where_parts)
        if given is None or (self.prompt is None and isinstance(given, str)):
            raise DataError(
                f"{where} has no prompt column, and {self.chosen.key!r} and {self.rejected.key!r} do not begin with a prompt. "
                "Set input_key to the prompt's column"
            )
        at = self.prompt.at(where) if self.prompt else self.chosen.at(where)
        return distinct(
            Pair(
                as_prompt(given, template, at),
                as_completion(chosen, _messages(given), self.chosen.at(where)),
                as_completion(rejected, _messages(given), self.rejected.at(where)),
                None if self.margin is None else _margin(value_of(record, self.margin.key, self.margin.option, where), where),
            ),
            where,
        )


@dataclass(frozen=True, kw_only=True)
class Compared(_Columns):
    """HelpSteer3 (2505.11475): two responses and a preference from -3 (the first is much better) to 3; 0 is a tie."""

    prompt: Column = Column("context", "input_key")
    first: Column = Column("response1", "chosen_key")
    second: Column = Column("response2", "rejected_key")
    preference: Column = Column("overall_preference", "margin_key")

    def rows(self, records: Records) -> Sequence[int]:
        """Return the indices of records without a tie."""
        texts = records.column(self.preference.key, self.preference.option)
        return [index for index, text in enumerate(texts) if self._number(text, records.where(index))]

    def read(self, record: Record, template: Template, where: str) -> Pair:
        given = self.prompt.text_or_messages(record, where)
        preference = self._number(value_of(record, self.preference.key, self.preference.option, where), where)
        better, worse = (self.first, self.second) if preference < 0 else (self.second, self.first)
        chosen, rejected = (
            as_completion(column.text_or_messages(record, where), _messages(given), column.at(where))
            for column in (better, worse)
        )
        return distinct(Pair(as_prompt(given, template, self.prompt.at(where)), chosen, rejected, abs(preference)), where)

    def _number(self, value: Any, where: str) -> float:
        return _number(value, self.preference.at(where), "from -3 to 3. Fix the record")


@dataclass(frozen=True, kw_only=True)
class PromptAndCompletion(_Columns):
    """A completion with a label. Without a prompt column, the completion column holds the whole conversation."""

    prompt: Column | None
    completion: Column
    label: Column

    def read(self, record: Record, template: Template, where: str) -> Verdict:
        at = self.completion.at(where)
        completion = self.completion.text_or_messages(record, where)
        if self.prompt is not None:
            given = self.prompt.text_or_messages(record, where)
        elif isinstance(completion, str):
            raise DataError(f"{at} is a completion without a prompt. Set input_key to the prompt's column")
        else:
            conversation = checked(completion, at)
            given, completion = conversation[:-1], conversation[-1:]
        return Verdict(
            as_prompt(given, template, self.prompt.at(where) if self.prompt else at),
            as_completion(completion, _messages(given), at),
            _truth(value_of(record, self.label.key, self.label.option, where), self.label.at(where)),
        )


def conversation_layout(source: DataSource, builtin: Builtin, records: Records) -> Layout[Turns]:
    """Find the layout of conversations from the keys that are set, else from the columns of the first record. Raises DataError."""
    record = records[0]
    question = _question(source, builtin, record)
    answer = _answer(source, builtin, record)
    messages = _conversation(source, record)
    named = source.input_key is not None or source.output_key is not None
    if named and source.messages_key is not None:
        raise DataError("messages_key and input_key or output_key are both set; keep the one to train on")
    if not named and source.messages_key is None and all(key in record for key in ("context", "question", "answers")):
        return Squad()
    if messages is not None and not named:
        return MessageList(messages=messages)
    if question is not None and answer is not None:
        return QuestionAndAnswer(question=question, answer=answer)
    raise _unknown("a conversation", records, "messages_key, or input_key and output_key")


def pair_layout(source: DataSource, builtin: Builtin, records: Records) -> Layout[Pair]:
    """Find the layout of pairs in the same way. Raises DataError."""
    record = records[0]
    chosen = _column("chosen_key", source.chosen_key, ("chosen",), record)
    rejected = _column("rejected_key", source.rejected_key, ("rejected",), record)
    named = source.chosen_key is not None or source.rejected_key is not None
    if not named and all(holds(record, key) for key in ("context", "response1", "response2", "overall_preference")):
        return Compared()
    if chosen is None or rejected is None:
        raise _unknown("a pair", records, "chosen_key and rejected_key (and input_key, where the prompt has its own column)")
    prompt = _question(source, builtin, record)
    margin = _column("margin_key", source.margin_key, ("margin",), record)
    return ChosenAndRejected(prompt=prompt, chosen=chosen, rejected=rejected, margin=margin)


def verdict_layout(source: DataSource, builtin: Builtin, records: Records) -> Layout[Verdict] | None:
    """Find the layout of unpaired preferences; None if the records are pairs. Raises DataError."""
    record = records[0]
    label = _column("label_key", source.label_key, ("label",), record)
    paired = source.chosen_key is not None or any(key in record for key in ("chosen", "overall_preference"))
    if paired and source.label_key is None:
        return None
    prompt = _question(source, builtin, record)
    answer = _answer(source, builtin, record)
    messages = _conversation(source, record)
    if label is not None and messages is not None and (answer is None or source.messages_key is not None):
        return PromptAndCompletion(prompt=None, completion=messages, label=label)
    if label is None or answer is None:
        raise _unknown("an unpaired preference", records, "label_key, input_key and output_key (or chosen_key and rejected_key)")
    return PromptAndCompletion(prompt=prompt, completion=answer, label=label)


def _question(source: DataSource, builtin: Builtin, record: Record) -> Column | None:
    return _column("input_key", source.input_key, ("prompt", builtin.input_key), record)


def _answer(source: DataSource, builtin: Builtin, record: Record) -> Column | None:
    return _column("output_key", source.output_key, ("completion", "response", builtin.output_key), record)


def _conversation(source: DataSource, record: Record) -> Column | None:
    return _column("messages_key", source.messages_key, ("messages", "conversations"), record)


def _column(option: str, key: str | None, usual: Iterable[str], record: Record) -> Column | None:
    """Return the key that is set, else the first of the usual keys that the record has."""
    found = key or next((name for name in usual if holds(record, name)), None)
    return None if found is None else Column(found, option)


def _unknown(what: str, records: Records, options: str) -> DataError:
    return DataError(
        f"{records.where(0)} has the keys {sorted(records[0])}, and it is unclear which of them make {what}. Set {options}"
    )


def checked(conversation: Turns, where: str) -> Turns:
    """Return a conversation up to its last reply. Raises DataError if it has no loss tokens."""
    trimmed = up_to_last_reply(conversation)
    if first_reply(trimmed) == len(trimmed):
        raise DataError(
            f"{where} has no assistant message that replies to another, so there is nothing to train on. Fix the record"
        )
    if not any(message.content.strip() for message in trimmed[1:] if message.role == "assistant"):
        raise DataError(f"{where}: all assistant messages are empty, so there is nothing to train on. Fix the record")
    return trimmed


def distinct(pair: Pair, where: str) -> Pair:
    if pair.chosen == pair.rejected:
        raise DataError(
            f"{where}: the chosen and the rejected completion are equal, so there is no preference. Remove the record"
        )
    return pair


def _messages(given: str | Turns) -> Turns:
    return () if isinstance(given, str) else given


def _whole(completion: str | Turns, prompt: str | Turns | None) -> bool:
    """Return whether a completion column includes the prompt, and no list of messages gives the prompt."""
    return not isinstance(prompt, tuple) and isinstance(completion, tuple) and completion[0].role != "assistant"


def _parted(chosen: Turns, rejected: Turns, where: str) -> tuple[Turns, Turns, Turns]:
    """Split two conversations into their common prefix and the rest of each. Raises DataError."""
    if chosen == rejected:
        raise DataError(f"{where} are the same conversation, so there is no preference. Remove the record")
    pairs = enumerate(zip(chosen, rejected, strict=False))
    common = next((place for place, (left, right) in pairs if left != right), min(len(chosen), len(rejected)))
    rests = chosen[common:], rejected[common:]
    if not common or any(not rest or rest[0].role != "assistant" for rest in rests):
        raise DataError(
            f"{where} must be the same conversation up to an assistant message; they differ from message {common + 1} on"
        )
    return chosen[:common], *rests


def _margin(value: Any, where: str) -> float:
    margin = _number(value, f"{where}: the margin", "of 0 or more")
    if margin < 0:
        raise DataError(
            f"{where}: the margin is {margin:g}, which means that the rejected completion is better. Set margin_key to numbers of 0 or more"
        )
    return margin


def _number(value: Any, where: str, kind: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(
            f"{where} is {value!r:.80}, not a number {kind}. Fix the record, or set margin_key to a column of numbers"
        )
    return number


def _truth(value: Any, where: str) -> bool:
    """Parse a boolean: a JSON boolean, 0 or 1, or their spellings in CSV files."""
    spelled = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
    found = spelled.get(str(value).strip().lower())
    if found is None:
        raise DataError(
            f"{where} is {value!r:.80}, not true or false. Set label_key to a column that says whether it is desirable"
        )
    return found
