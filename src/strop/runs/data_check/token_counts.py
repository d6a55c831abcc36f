"""The tokens of a row, made as the run makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from strop.data.recorded.examples import Conversation, Preference, UnpairedPreference
from strop.models.chat_template import ChatTemplate
from strop.rollouts.recorded import plan_demonstration, plan_preference, plan_unpaired_preference
from strop.rollouts.recorded_tokens import RecordedConversation, RecordedRules, encode_spans, finish_spans
from strop.runs.data_check.checked_row import CheckedRow
from strop.types import Task

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
