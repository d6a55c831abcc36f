"""Normalise texts, so that equal ones compare equal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from strop.data.messages import first_reply_index
from strop.extensions.checks.data_report import MOST_EXAMPLES, DataKind, FaultyRow
from strop.extensions.evaluation.overlap import Overlap, QuestionIndex
from strop.extensions.recorded.examples import Conversation, Preference, UnpairedPreference
from strop.extensions.recorded.planned_groups import plan_demonstration, plan_preference, plan_unpaired_preference
from strop.extensions.recorded.recorded_tokens import RecordedConversation, RecordedRules, encode_spans, finish_spans
from strop.models.chat_template import ChatTemplate, images_of
from strop.models.vision.image_files import ImageError
from strop.types import Message, Messages, Task
from strop.user_code import describe_error

_MARKS = re.compile(r"[.,;:!?\"'`]+(?=\s|$)")


def fold_text(text: str) -> str:
    """Return a text in lower case, with single spaces, without white space at its ends and punctuation at word ends."""
    return " ".join(_MARKS.sub(" ", text).casefold().split())


@dataclass(frozen=True)
class CheckedRow:
    """A row as the run reads it, before it is tokens."""

    position: int
    location: str
    question: str
    answer: str
    prompt: Messages = ()  # of a rollout
    example: Task | None = None  # recorded


NO_LIMIT = 1 << 40


@dataclass(frozen=True)
class TokenCounts:
    """The tokens of a row: of a pair, of its longer side."""

    prompt: int
    completion: int = -1  # in the loss; -1: of a rollout
    length: int = 0


def count_tokens(row: CheckedRow, template: ChatTemplate, rules: RecordedRules | None) -> TokenCounts:
    """Return the tokens of a row, however many they are. Raises whatever a chat template does, ValueError for one that cannot be used."""
    if rules is None:
        length = len(template.encode_with_images(row.prompt).tokens)
        return TokenCounts(length, length=length)
    rules = replace(rules, max_length=NO_LIMIT)  # compared by the caller, so that the lengths of long ones are known
    sides = [_count_side(each, template, rules) for each in _plan(row.example, rules)]
    return max(sides, key=lambda side: side.length)


def _plan(example: Task | None, rules: RecordedRules) -> Sequence[RecordedConversation]:
    match example:
        case Conversation():
            return plan_demonstration(0, "", example, rules).conversations
        case Preference():
            return plan_preference(0, "", example, rules).conversations
        case UnpairedPreference():
            return plan_unpaired_preference(0, "", example, example, rules).conversations[:1]
    raise TypeError(f"{type(example).__name__} is no recorded example")


def _count_side(conversation: RecordedConversation, template: ChatTemplate, rules: RecordedRules) -> TokenCounts:
    """Return the tokens of a conversation: of its longest path, and those of all paths in the loss."""
    paths = [finish_spans(path, template, rules) for path in encode_spans(conversation, template, rules)]
    completion = sum(len(span.tokens) for _, *turns in paths for span in turns if span.in_loss)
    return TokenCounts(len(paths[0][0].tokens), completion, max(sum(len(span.tokens) for span in path) for path in paths))


MOST_REASONS = 8  # of one check in one entry that are reported separately
LONGEST_TEXT = 120  # characters of an example
_NUMBERS = re.compile(r"\d+")


@dataclass
class Faults:
    """Faulty rows by check and reason: how many, and the first of them."""

    found: dict[tuple[str, str], tuple[str, int, list[FaultyRow]]] = field(default_factory=dict)

    def add(self, check: str, reason: str, location: str, text: str = "", count: int = 1) -> None:
        key = (check, _NUMBERS.sub("#", reason)[:200])
        if key not in self.found and sum(known == check for known, _ in self.found) >= MOST_REASONS:
            key = (check, "")
            reason = "other reasons"
        said, before, examples = self.found.get(key, (reason, 0, []))
        if len(examples) < MOST_EXAMPLES:
            examples.append(FaultyRow(location, shorten_text(text)))
        self.found[key] = (said, before + count, examples)

    def merge(self, other: Faults) -> None:
        for (check, _), (reason, count, examples) in other.found.items():
            for number, example in enumerate(examples):
                self.add(check, reason, example.location, example.text, count - len(examples) + 1 if number == 0 else 1)

    def __iter__(self) -> Iterator[tuple[str, str, int, tuple[FaultyRow, ...]]]:
        return ((check, reason, count, tuple(examples)) for (check, _), (reason, count, examples) in self.found.items())


def shorten_text(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_TEXT else f"{line[:LONGEST_TEXT]}..."


@dataclass
class RowsChecked:
    """What was found of some rows of one entry. Texts are kept as digests."""

    positions: list[int] = field(default_factory=list)
    usable: list[bool] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)  # tokens; -1: unknown
    completion: list[int] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)  # digests: of the example without case, marks and white space,
    exact: list[int] = field(default_factory=list)  # as it stands,
    question: list[int] = field(default_factory=list)  # and of its prompt
    faults: Faults = field(default_factory=Faults)
    overlaps: list[Overlap] = field(default_factory=list)

    def columns(self) -> dict[str, Any]:
        """Return the columns as arrays."""
        kinds = {"positions": np.int64, "usable": np.bool_, "prompt": np.int32, "completion": np.int32}
        names = ("positions", "usable", "prompt", "completion", "whole", "exact", "question")
        return {name: np.array(getattr(self, name), dtype=kinds.get(name, np.uint64)) for name in names}


@dataclass(frozen=True)
class RowChecker:
    """Looks at the rows of one entry."""

    kind: DataKind
    template: ChatTemplate | None  # None: tokens are not counted
    rules: RecordedRules | None  # of recorded data
    limit: int | None  # tokens of a prompt, or of a whole recorded example
    limit_keys: str
    needs_answer: bool
    index: QuestionIndex | None  # of evaluation questions

    def check(self, rows: Sequence[CheckedRow]) -> RowsChecked:
        found = RowsChecked()
        for row in rows:
            usable, lengths = self._check_row(row, found.faults)
            found.positions.append(row.position)
            found.usable.append(usable)
            found.prompt.append(lengths[0])
            found.completion.append(lengths[1])
            _add_digests(row, found)
        if self.index is not None:
            texts = ((row.location, "\n".join(_list_texts(row))) for row in rows)
            found.overlaps = list(self.index.search(texts))
        return found

    def _check_row(self, row: CheckedRow, faults: Faults) -> tuple[bool, tuple[int, int]]:
        usable = self._check_texts(row, _list_conversations(row), faults)
        if self.template is None:
            return usable, (-1, -1)
        try:
            for messages in () if _is_raw_text(row) else _list_conversations(row):
                self._check_rendering(row, messages, faults)
            counted = count_tokens(row, self.template, self.rules)
        except Exception as error:  # chat templates may raise anything
            said = describe_error(error) if row.example is None else str(error)
            faults.add("image" if isinstance(error, ImageError) else "template", said, row.location, row.question)
            return False, (-1, -1)
        fits = self._fits(row, counted.length, faults)
        return fits and usable, (counted.prompt, counted.completion)

    def _fits(self, row: CheckedRow, length: int, faults: Faults) -> bool:
        if self.limit is None or length <= self.limit:
            return True
        what = "the prompt has" if row.example is None else "it has"
        faults.add(
            "too_long",
            f"{what} more than {self.limit} tokens ({self.limit_keys})",
            row.location,
            f"{length} tokens: {row.question}",
        )
        return False

    def _check_texts(self, row: CheckedRow, conversations: Sequence[Messages], faults: Faults) -> bool:
        """Look for empty texts. Return whether the row can be used."""
        usable = True
        contents = [message.content for messages in conversations for message in messages]
        prompts = contents if row.example is None or _is_raw_text(row) else _list_prompt_texts(row.example)
        if not any(content.strip() for content in prompts) and not any(map(images_of, conversations)):
            faults.add("empty", "the prompt is empty", row.location, row.answer)
            usable = False
        if row.example is None and self.needs_answer and not row.answer.strip():
            faults.add("answer", "there is no reference answer", row.location, row.question)
            usable = False
        for message in (message for messages in conversations for message in messages if row.example is not None):
            if message.role == "assistant" and not (message.content.strip() or message.tool_calls or message.reasoning):
                faults.add("empty", "a reply is empty", row.location, row.question)
                usable = False
                break
        return usable

    def _check_rendering(self, row: CheckedRow, messages: Messages, faults: Faults) -> None:
        """Look for texts of messages that the chat template drops or changes."""
        assert self.template is not None
        tools = getattr(row.example, "tools", ())
        rendered = self.template.render_conversation(messages, tools=tools)
        for index, message in enumerate(messages):
            if message.content.strip() not in rendered:
                if message.role == "assistant" and index:  # it is trained on as the last message
                    through = self.template.render_conversation(messages[: index + 1], tools=tools)
                    if message.content.strip() in through:
                        continue
                reason = f"the chat template drops or rewrites the text of messages by {message.role!r}"
                faults.add("rewritten", reason, row.location, message.content)
                return


def _is_raw_text(row: CheckedRow) -> bool:
    """Whether a row is a text without a prompt, which is trained on as it stands."""
    return getattr(row.example, "is_raw_text", False)


def _list_conversations(row: CheckedRow) -> list[Messages]:
    """Return the conversations of a row: its prompt, or each whole conversation of a recorded example."""
    match row.example:
        case None:
            return [row.prompt]
        case Conversation() as conversation:
            return [conversation.messages]
        case Preference() as pair:
            return [(*pair.prompt, *pair.chosen), (*pair.prompt, *pair.rejected)]
        case UnpairedPreference() as judged:
            return [(*judged.prompt, *judged.completion)]
        case other:
            raise TypeError(f"{type(other).__name__} is no recorded example")


def _list_prompt_texts(example: Task) -> list[str]:
    messages: Sequence[Message] = (
        example.messages[: first_reply_index(example.messages)]
        if isinstance(example, Conversation)
        else getattr(example, "prompt", ())
    )
    return [message.content for message in messages]


def _list_texts(row: CheckedRow) -> list[str]:
    if row.example is None:
        return [row.question]
    return [message.content for messages in _list_conversations(row)[:1] for message in messages]


def _add_digests(row: CheckedRow, found: RowsChecked) -> None:
    if row.example is None:
        asked, parts = [row.question], [row.answer]
        shown = _name_images(row.prompt)
    else:
        asked = _list_prompt_texts(row.example)
        shown = _name_images(_list_conversations(row)[0])
        match row.example:
            case Preference() as pair:
                parts = [_join(pair.chosen), _join(pair.rejected)]
            case UnpairedPreference() as judged:
                parts = [_join(judged.completion), str(judged.desirable)]
            case _:
                parts = _list_texts(row)[len(asked) :]
    found.exact.append(digest("\0".join([*asked, *shown, *parts])))
    asked, parts = [*map(fold_text, asked), *shown], [*map(fold_text, parts)]
    found.question.append(digest("\0".join(asked)))
    found.whole.append(digest("\0".join(asked) + "\1" + "\0".join(parts)))


def _name_images(messages: Messages) -> list[str]:
    """Return a digest of each image, by which questions about other images are other questions."""
    return [str(digest(image.source)) for image in images_of(messages)]


def _join(messages: Messages) -> str:
    return "\n".join(message.content for message in messages)


def digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
