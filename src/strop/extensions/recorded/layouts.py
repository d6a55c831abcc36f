"""Column layouts of datasets with conversations, preference pairs or unpaired preferences: a record -> messages.

The layout of a dataset is determined once, from the keys that are set and the columns of its first record, and applies to all records,
so that no column changes its meaning within a run.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

from strop.data.builtin_dataset import BuiltinDataset
from strop.data.builtin_sets import BUILTIN_DATASETS
from strop.data.messages import (
    first_reply_index,
    get_text_or_messages,
    make_completion,
    make_prompt,
    parse_messages,
    trim_after_last_reply,
)
from strop.data.prompt_template import PromptTemplate
from strop.data.sources.image_columns import IMAGES
from strop.data.sources.records import DataError, Record, Records, check_text, get_text, get_value, has_key
from strop.data.sources.source import DataSource
from strop.extensions.recorded.raw_text import find_texts, is_text
from strop.types import Message, assistant, system

MessageTuple = tuple[Message, ...]
PartsT = TypeVar("PartsT")


@dataclass(frozen=True)
class CompletionPair:
    """Two completions of one prompt."""

    prompt: MessageTuple
    chosen: MessageTuple
    rejected: MessageTuple
    margin: float | None = None


@dataclass(frozen=True)
class UnpairedCompletion:
    """A completion of a prompt, and whether it is desirable."""

    prompt: MessageTuple
    completion: MessageTuple
    desirable: bool


@dataclass(frozen=True)
class ColumnKey:
    key: str
    option: str  # the setting that chooses the key

    def get_text_or_messages(self, record: Record, where: str) -> str | MessageTuple:
        return get_text_or_messages(record, self.key, self.option, where)

    def location(self, where: str) -> str:
        return f"{where}: {self.key!r}"


@dataclass(frozen=True, kw_only=True)
class Layout(ABC, Generic[PartsT]):
    """Reads examples of the type ``PartsT`` from the columns that its fields name. Every record is one, unless a subclass skips some."""

    skips: ClassVar[bool] = False  # whether some records may not be examples
    not_examples: ClassVar[str] = "prefer neither response"  # reason given for skipped records

    @property
    def columns(self) -> frozenset[str]:
        """The columns that are read; the others become metadata."""
        used = (value for value in vars(self).values() if isinstance(value, ColumnKey))
        return frozenset(column.key.split(".")[0] for column in used)

    @abstractmethod
    def read(self, record: Record, template: PromptTemplate, where: str) -> PartsT:
        """Return the parts of a record. Errors (DataError) refer to ``where``."""

    def example_indices(self, records: Records) -> Sequence[int]:
        """Return the indices of the records that are examples."""
        return range(len(records))

    def is_example(self, record: Record, where: str) -> bool:
        """Return whether a record is an example."""
        return True


@dataclass(frozen=True, kw_only=True)
class TextLayout(Layout[MessageTuple]):
    """A text in one column, trained on as it is. Records without text are skipped."""

    skips: ClassVar[bool] = True
    not_examples: ClassVar[str] = "have no text"

    text: ColumnKey

    @property
    def columns(self) -> frozenset[str]:
        return frozenset({self.text.key})

    def example_indices(self, records: Records) -> Sequence[int]:
        return find_texts(records, self.text.key)

    def is_example(self, record: Record, where: str) -> bool:
        return is_text(record.get(self.text.key))

    def read(self, record: Record, template: PromptTemplate, where: str) -> MessageTuple:
        return (assistant(check_text(str(record[self.text.key]), self.text.key, where)),)


@dataclass(frozen=True, kw_only=True)
class MessagesLayout(Layout[MessageTuple]):
    """A conversation in one column."""

    messages: ColumnKey
    system: ColumnKey | None = None  # a system prompt to put before them

    def read(self, record: Record, template: PromptTemplate, where: str) -> MessageTuple:
        at = self.messages.location(where)
        value = get_value(record, self.messages.key, self.messages.option, where)
        messages = (*_read_system(self.system, record, where), *parse_messages(value, at, record.get(IMAGES)))
        return check_conversation(make_prompt(messages, template, at), at)


@dataclass(frozen=True, kw_only=True)
class QuestionAnswerLayout(Layout[MessageTuple]):
    """A prompt and its completion in two columns."""

    question: ColumnKey
    answer: ColumnKey
    system: ColumnKey | None = None  # a system prompt to put before them
    answer_marker: str | None = None  # the answer follows the last occurrence

    def read(self, record: Record, template: PromptTemplate, where: str) -> MessageTuple:
        prompt = self.question.get_text_or_messages(record, where)
        found = self.answer.get_text_or_messages(record, where)
        if self.answer_marker is not None and isinstance(found, str):
            found = found.rpartition(self.answer_marker)[2].strip()
        answer = make_completion(found, _as_messages(prompt), self.answer.location(where))
        at = self.question.location(where)
        given = _read_system(self.system, record, where)
        messages = make_prompt(prompt, replace(template, system=None) if given else template, at, record.get(IMAGES))
        return check_conversation((*given, *messages, *answer), self.answer.location(where))


@dataclass(frozen=True, kw_only=True)
class SquadLayout(Layout[MessageTuple]):
    """SQuAD (1606.05250): a passage as the system prompt, a question on it, and answer spans, of which the first is trained on."""

    context: ColumnKey = ColumnKey("context", "input_key")
    question: ColumnKey = ColumnKey("question", "input_key")
    answers: ColumnKey = ColumnKey("answers", "output_key")

    def read(self, record: Record, template: PromptTemplate, where: str) -> MessageTuple:
        context, question = (get_text(record, column.key, column.option, where) for column in (self.context, self.question))
        if not has_key(record, "answers.text.0"):
            raise DataError(
                f"{where}: 'answers' is {record.get('answers')!r:.80}, without a first text; remove questions that have no answer"
            )
        answer = make_completion(get_text(record, "answers.text.0", "output_key", where), (), where)
        prompt = make_prompt(question, replace(template, system=None), self.question.location(where), record.get(IMAGES))
        return check_conversation((system(context), *prompt, *answer), self.answers.location(where))


@dataclass(frozen=True, kw_only=True)
class ChosenRejectedLayout(Layout[CompletionPair]):
    """The better and the worse completion, with the prompt in its own column, or as the common prefix of both."""

    prompt: ColumnKey | None
    chosen: ColumnKey
    rejected: ColumnKey
    margin: ColumnKey | None

    def read(self, record: Record, template: PromptTemplate, where: str) -> CompletionPair:
        chosen, rejected = (column.get_text_or_messages(record, where) for column in (self.chosen, self.rejected))
        prompt = self.prompt.get_text_or_messages(record, where) if self.prompt else None
        if _includes_prompt(chosen, prompt) and _includes_prompt(rejected, prompt):
            both = f"{where}: {self.chosen.key!r} and {self.rejected.key!r}"
            prompt, chosen, rejected = _split_common_prompt(_as_messages(chosen), _as_messages(rejected), both)
        if prompt is None or (self.prompt is None and isinstance(prompt, str)):
            raise DataError(
                f"{where} has no prompt column, and {self.chosen.key!r} and {self.rejected.key!r} do not begin with a prompt. "
                "Set input_key to the prompt's column"
            )
        at = self.prompt.location(where) if self.prompt else self.chosen.location(where)
        return check_distinct(
            CompletionPair(
                make_prompt(prompt, template, at, record.get(IMAGES)),
                make_completion(chosen, _as_messages(prompt), self.chosen.location(where)),
                make_completion(rejected, _as_messages(prompt), self.rejected.location(where)),
                None
                if self.margin is None
                else _parse_margin(get_value(record, self.margin.key, self.margin.option, where), where),
            ),
            where,
        )


@dataclass(frozen=True, kw_only=True)
class RankedCompletionsLayout(Layout[CompletionPair]):
    """Messages, and a list of two completions, each with its messages and its rank; the lower rank is the better one."""

    prompt: ColumnKey = ColumnKey("context", "input_key")
    completions: ColumnKey = ColumnKey("completions", "chosen_key")

    def read(self, record: Record, template: PromptTemplate, where: str) -> CompletionPair:
        at = self.completions.location(where)
        ranked = get_value(record, self.completions.key, self.completions.option, where)
        if not isinstance(ranked, list | tuple) or len(ranked) != 2:
            raise DataError(f"{at} is {ranked!r:.80}, not a list of two completions, each an object with rank and completion")
        ranks = [_parse_number(get_value(each, "rank", "chosen_key", at), at, "that ranks a completion") for each in ranked]
        if ranks[0] == ranks[1]:
            raise DataError(f"{at}: both completions have the rank {ranks[0]:g}, so there is no preference. Remove the record")
        better, worse = ranked if ranks[0] < ranks[1] else (ranked[1], ranked[0])
        prompt = self.prompt.get_text_or_messages(record, where)
        chosen, rejected = (
            make_completion(get_text_or_messages(each, "completion", "chosen_key", at), _as_messages(prompt), at)
            for each in (better, worse)
        )
        asked = make_prompt(prompt, template, self.prompt.location(where), record.get(IMAGES))
        return check_distinct(CompletionPair(asked, chosen, rejected), where)


@dataclass(frozen=True, kw_only=True)
class HelpSteer3Layout(Layout[CompletionPair]):
    """HelpSteer3 (2505.11475): two responses and a preference from -3 (the first is much better) to 3; 0 is a tie."""

    skips: ClassVar[bool] = True
    prompt: ColumnKey = ColumnKey("context", "input_key")
    first: ColumnKey = ColumnKey("response1", "chosen_key")
    second: ColumnKey = ColumnKey("response2", "rejected_key")
    preference: ColumnKey = ColumnKey("overall_preference", "margin_key")

    def example_indices(self, records: Records) -> Sequence[int]:
        """Return the indices of records without a tie."""
        texts = records.iter_column(self.preference.key, self.preference.option)
        return [index for index, text in enumerate(texts) if self._parse_preference(text, records.location(index))]

    def is_example(self, record: Record, where: str) -> bool:
        preference = get_value(record, self.preference.key, self.preference.option, where)
        return self._parse_preference(preference, where) != 0

    def read(self, record: Record, template: PromptTemplate, where: str) -> CompletionPair:
        prompt = self.prompt.get_text_or_messages(record, where)
        preference = self._parse_preference(get_value(record, self.preference.key, self.preference.option, where), where)
        better, worse = (self.first, self.second) if preference < 0 else (self.second, self.first)
        chosen, rejected = (
            make_completion(column.get_text_or_messages(record, where), _as_messages(prompt), column.location(where))
            for column in (better, worse)
        )
        asked = make_prompt(prompt, template, self.prompt.location(where), record.get(IMAGES))
        return check_distinct(CompletionPair(asked, chosen, rejected, abs(preference)), where)

    def _parse_preference(self, value: Any, where: str) -> float:
        return _parse_number(value, self.preference.location(where), "from -3 to 3. Fix the record")


@dataclass(frozen=True, kw_only=True)
class LabeledCompletionLayout(Layout[UnpairedCompletion]):
    """A completion with a label. Without a prompt column, the completion column holds the whole conversation."""

    prompt: ColumnKey | None
    completion: ColumnKey
    label: ColumnKey

    def read(self, record: Record, template: PromptTemplate, where: str) -> UnpairedCompletion:
        at = self.completion.location(where)
        completion = self.completion.get_text_or_messages(record, where)
        if self.prompt is not None:
            prompt = self.prompt.get_text_or_messages(record, where)
        elif isinstance(completion, str):
            raise DataError(f"{at} is a completion without a prompt. Set input_key to the prompt's column")
        else:
            conversation = check_conversation(completion, at)
            prompt, completion = conversation[:-1], conversation[-1:]
        return UnpairedCompletion(
            make_prompt(prompt, template, self.prompt.location(where) if self.prompt else at, record.get(IMAGES)),
            make_completion(completion, _as_messages(prompt), at),
            _parse_bool(get_value(record, self.label.key, self.label.option, where), self.label.location(where)),
        )


def _read_system(column: ColumnKey | None, record: Record, where: str) -> MessageTuple:
    """Return the system prompt of a record, if it has one."""
    if column is None or record.get(column.key) is None:
        return ()
    return (system(get_text(record, column.key, column.option, where)),)


def find_conversation_layout(source: DataSource, builtin: BuiltinDataset, records: Records) -> Layout[MessageTuple]:
    """Find the layout of conversations from the keys that are set, else from the columns of the first record. Raises DataError."""
    if source.text_key is not None:
        return TextLayout(text=ColumnKey(source.text_key, "text_key"))
    record = records[0]
    question = _question_column(source, builtin, record)
    answer = _answer_column(source, builtin, record)
    messages = _messages_column(source, record)
    system_key = source.system_key or builtin.system_key
    system_column = None if system_key is None else ColumnKey(system_key, "system_key")
    named = source.input_key is not None or source.output_key is not None
    named = named and not (source.messages_key is not None and has_key(record, source.messages_key))
    if source.is_made_by_code and messages is not None and not has_key(record, str(source.input_key)):
        named = False  # its class has already read the columns
    if not named and source.messages_key is None and all(key in record for key in ("context", "question", "answers")):
        return SquadLayout()
    if not named and source.messages_key is None and _is_builtin(source) and _has_columns(record, builtin):
        question, answer = ColumnKey(builtin.input_key, "input_key"), ColumnKey(builtin.output_key, "output_key")
        messages = None  # of sets with both, such as OpenR1-Math-220k, question and answer are read, as in NeMo-RL
    if messages is not None and not named:
        return MessagesLayout(messages=messages, system=system_column)
    if question is not None and answer is not None:
        return QuestionAnswerLayout(question=question, answer=answer, system=system_column, answer_marker=builtin.answer_marker)
    raise _unknown_layout("a conversation", records, "messages_key, or input_key and output_key")


def find_pair_layout(source: DataSource, builtin: BuiltinDataset, records: Records) -> Layout[CompletionPair]:
    """Find the layout of pairs from the keys that are set, else from the columns of the first record. Raises DataError."""
    record = records[0]
    chosen = _find_column("chosen_key", source.chosen_key, ("chosen",), record)
    rejected = _find_column("rejected_key", source.rejected_key, ("rejected",), record)
    named = source.chosen_key is not None or source.rejected_key is not None
    if not named and all(has_key(record, key) for key in ("context", "response1", "response2", "overall_preference")):
        return HelpSteer3Layout()
    if not named and all(key in record for key in ("context", "completions")):
        return RankedCompletionsLayout()
    if chosen is None or rejected is None:
        raise _unknown_layout(
            "a pair", records, "chosen_key and rejected_key (and input_key, where the prompt has its own column)"
        )
    prompt = _question_column(source, builtin, record)
    margin = _find_column("margin_key", source.margin_key, ("margin",), record)
    return ChosenRejectedLayout(prompt=prompt, chosen=chosen, rejected=rejected, margin=margin)


def find_unpaired_layout(source: DataSource, builtin: BuiltinDataset, records: Records) -> Layout[UnpairedCompletion] | None:
    """Find the layout of unpaired preferences; None if the records are pairs. Raises DataError."""
    record = records[0]
    label = _find_column("label_key", source.label_key, ("label",), record)
    paired = source.chosen_key is not None or any(key in record for key in ("chosen", "overall_preference"))
    if paired and source.label_key is None:
        return None
    prompt = _question_column(source, builtin, record)
    answer = _answer_column(source, builtin, record)
    messages = _messages_column(source, record)
    if label is not None and messages is not None and (answer is None or source.messages_key is not None):
        return LabeledCompletionLayout(prompt=None, completion=messages, label=label)
    if label is None or answer is None:
        raise _unknown_layout(
            "an unpaired preference", records, "label_key, input_key and output_key (or chosen_key and rejected_key)"
        )
    return LabeledCompletionLayout(prompt=prompt, completion=answer, label=label)


NAMING_KEYS = ("input_key", "output_key", "messages_key", "chosen_key", "rejected_key", "label_key", "system_key", "margin_key")


def find_unread_keys(source: DataSource, layout: Layout[Any]) -> list[str]:
    """Return the keys of a source that name a column its layout does not read, as KEY=COLUMN."""
    if source.is_made_by_code:  # its class has already read them
        return []
    read = {(column.option, column.key) for column in vars(layout).values() if isinstance(column, ColumnKey)}
    named = ((name, getattr(source, name)) for name in NAMING_KEYS)
    return [f"{name}={column}" for name, column in named if column is not None and (name, column) not in read]


def _is_builtin(source: DataSource) -> bool:
    return source.dataset_name in BUILTIN_DATASETS or source.rows_of is not None


def _has_columns(record: Record, builtin: BuiltinDataset) -> bool:
    return has_key(record, builtin.input_key) and has_key(record, builtin.output_key)


def _question_column(source: DataSource, builtin: BuiltinDataset, record: Record) -> ColumnKey | None:
    return _find_column("input_key", source.input_key, ("prompt", builtin.input_key), record)


def _answer_column(source: DataSource, builtin: BuiltinDataset, record: Record) -> ColumnKey | None:
    return _find_column("output_key", source.output_key, ("completion", "response", builtin.output_key, "solution"), record)


def _messages_column(source: DataSource, record: Record) -> ColumnKey | None:
    return _find_column("messages_key", source.messages_key, ("messages", "conversations"), record)


def _find_column(option: str, key: str | None, usual: Iterable[str], record: Record) -> ColumnKey | None:
    """Return the key that is set, else the first of the usual keys that the record has."""
    name = key or next((name for name in usual if has_key(record, name)), None)
    return None if name is None else ColumnKey(name, option)


def _unknown_layout(what: str, records: Records, options: str) -> DataError:
    return DataError(
        f"{records.location(0)} has the keys {sorted(records[0])}, and it is unclear which of them make {what}. Set {options}"
    )


def check_conversation(conversation: MessageTuple, where: str) -> MessageTuple:
    """Return a conversation up to its last reply. Raises DataError if it has no loss tokens."""
    trimmed = trim_after_last_reply(conversation)
    if first_reply_index(trimmed) == len(trimmed):
        raise DataError(
            f"{where} has no assistant message that replies to another, so there is nothing to train on. Fix the record"
        )
    replies = [message for message in trimmed[1:] if message.role == "assistant"]
    if not any(message.content.strip() or message.tool_calls or message.reasoning for message in replies):
        raise DataError(f"{where}: all assistant messages are empty, so there is nothing to train on. Fix the record")
    if not any(message.in_loss for message in replies):
        raise DataError(f"{where}: all assistant messages have weight 0, so there is nothing to train on. Fix the record")
    return trimmed


def check_distinct(pair: CompletionPair, where: str) -> CompletionPair:
    if pair.chosen == pair.rejected:
        raise DataError(
            f"{where}: the chosen and the rejected completion are equal, so there is no preference. Remove the record"
        )
    return pair


def _as_messages(value: str | MessageTuple) -> MessageTuple:
    return () if isinstance(value, str) else value


def _includes_prompt(completion: str | MessageTuple, prompt: str | MessageTuple | None) -> bool:
    """Return whether a completion column includes the prompt, and the prompt is not given as messages."""
    return not isinstance(prompt, tuple) and isinstance(completion, tuple) and completion[0].role != "assistant"


def _split_common_prompt(
    chosen: MessageTuple, rejected: MessageTuple, where: str
) -> tuple[MessageTuple, MessageTuple, MessageTuple]:
    """Split two conversations into their common prefix and the rest of each. Raises DataError."""
    if chosen == rejected:
        raise DataError(f"{where} are the same conversation, so there is no preference. Remove the record")
    pairs = enumerate(zip(chosen, rejected, strict=False))
    common = next((index for index, (left, right) in pairs if left != right), min(len(chosen), len(rejected)))
    completions = chosen[common:], rejected[common:]
    if not common or any(not completion or completion[0].role != "assistant" for completion in completions):
        raise DataError(
            f"{where} must be the same conversation up to an assistant message; they differ from message {common + 1} on"
        )
    return chosen[:common], *completions


def _parse_margin(value: Any, where: str) -> float:
    margin = _parse_number(value, f"{where}: the margin", "of 0 or more")
    if margin < 0:
        raise DataError(
            f"{where}: the margin is {margin:g}, which means that the rejected completion is better. Set margin_key to numbers of 0 or more"
        )
    return margin


def _parse_number(value: Any, where: str, kind: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(
            f"{where} is {value!r:.80}, not a number {kind}. Fix the record, or set margin_key to a column of numbers"
        )
    return number


def _parse_bool(value: Any, where: str) -> bool:
    """Parse a boolean: a JSON boolean, 0 or 1, or their spellings in CSV files."""
    spelled = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
    parsed = spelled.get(str(value).strip().lower())
    if parsed is None:
        raise DataError(
            f"{where} is {value!r:.80}, not true or false. Set label_key to a column of desirable (true) or undesirable (false)"
        )
    return parsed
