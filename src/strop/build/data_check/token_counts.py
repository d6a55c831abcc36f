"""How many tokens rows have. Their texts are encoded together, which takes a fraction of the time of each alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from strop.build.data_check.checked_row import CheckedRow
from strop.data.recorded.examples import Conversation, Preference, UnpairedPreference
from strop.models.chat_template import ChatTemplate, TokenSpan, images_of
from strop.rollouts.recorded import plan_demonstration, plan_preference, plan_unpaired_preference
from strop.rollouts.recorded_tokens import RecordedConversation, RecordedRules, encode_spans, finish_spans
from strop.types import Messages, Task

NO_LIMIT = 1 << 40
CLOSE = 32  # tokens from the limit within which a conversation is encoded as the run does it

T = TypeVar("T")


@dataclass(frozen=True)
class TokenCounts:
    """The tokens of a row: of a pair, of its longer side."""

    prompt: int
    completion: int = -1  # in the loss; -1: of a rollout
    length: int = 0
    ends: bool = True  # every side ends with a stop token


def count_tokens(
    rows: Sequence[CheckedRow], template: ChatTemplate, rules: RecordedRules | None, limit: int | None
) -> list[TokenCounts | Exception]:
    """Return the tokens of each row, or why it cannot become tokens: chat templates may raise anything.

    A conversation is encoded in one piece and cut where its replies begin and end. The run encodes what lies between the cuts by itself,
    and so does this where a token lies across a cut, close to the limit, and for thorough rows.
    """
    if rules is None:
        return _count_prompts([row.prompt for row in rows], template)
    rules = replace(rules, max_length=NO_LIMIT)  # compared by the caller, so that the lengths of long ones are known
    plans = [_plan(row.example, rules) for row in rows]
    cuts = [[_attempt(_cut_text, each, template, rules) for each in plan] for plan in plans]
    texts = ["".join(path) for cut in cuts for each in cut if isinstance(each, list) for path in each]
    encoded = iter(_encode_together(texts, template))
    spans = [
        [[_find_spans(path, next(encoded)) for path in each] if isinstance(each, list) else each for each in cut] for cut in cuts
    ]
    return [_attempt(_count, *each, template, rules, limit) for each in zip(rows, plans, spans, strict=True)]


def _count_prompts(prompts: Sequence[Messages], template: ChatTemplate) -> list[TokenCounts | Exception]:
    if not _encodes_together(template) or any(map(images_of, prompts)):
        lengths = [_attempt(lambda prompt: len(template.encode_with_images(prompt).tokens), prompt) for prompt in prompts]
    else:
        texts = [_attempt(template.render_prompt, prompt) for prompt in prompts]
        encoded = iter(_encode_together([text for text in texts if isinstance(text, str)], template))
        lengths = [len(next(encoded)) if isinstance(text, str) else text for text in texts]
    return [each if isinstance(each, Exception) else TokenCounts(each, length=each) for each in lengths]


def _plan(example: Task | None, rules: RecordedRules) -> tuple[RecordedConversation, ...]:
    match example:
        case Conversation():
            return plan_demonstration(0, "", example, rules).conversations
        case Preference():
            return plan_preference(0, "", example, rules).conversations
        case UnpairedPreference():
            return plan_unpaired_preference(0, "", example, example, rules).conversations[:1]
    raise TypeError(f"{type(example).__name__} is no recorded example")


def _cut_text(conversation: RecordedConversation, template: ChatTemplate, rules: RecordedRules) -> list[list[str]] | None:
    """Return the texts of the spans of each path of a conversation; None if they cannot be encoded in one piece."""
    if conversation.raw_text is not None or not _encodes_together(template) or images_of(conversation.messages):
        return None
    return template.split_text(
        conversation.messages, loss_from=conversation.loss_from, opened=rules.add_generation_prompt, tools=conversation.tools
    )


def _encodes_together(template: ChatTemplate) -> bool:
    return not template.joins_plain_text and bool(getattr(template.tokenizer, "is_fast", False))


def _encode_together(texts: Sequence[str], template: ChatTemplate) -> Sequence[Any]:
    if not texts:
        return ()
    return template.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False).encodings or ()


def _find_spans(texts: Sequence[str], encoding: Any) -> list[TokenSpan] | None:
    """Cut the tokens of joined texts between the texts; None if a token lies across a cut."""
    ids: list[int] = encoding.ids
    *cuts, end = accumulate(map(len, texts))
    bounds = [0, *(_find_bound(encoding, cut) if cut < end else len(ids) for cut in cuts), len(ids)]
    if None in bounds:
        return None
    parts = zip(texts, pairwise(bounds), strict=True)
    spans = [TokenSpan(ids[start:end], index % 2 == 1, text) for index, (text, (start, end)) in enumerate(parts)]
    return spans if texts[-1] else spans[:-1]


def _find_bound(encoding: Any, cut: int) -> int | None:
    """Return the index of the token that begins at a character; None if none does, or the one before reaches over it."""
    index: int | None = encoding.char_to_token(cut)
    if index is None:
        return None
    begins = encoding.token_to_chars(index)[0] == cut
    return index if begins and (index == 0 or encoding.token_to_chars(index - 1)[1] <= cut) else None


def _count(
    row: CheckedRow,
    plan: Sequence[RecordedConversation],
    cut: Sequence[Sequence[list[TokenSpan] | None] | Exception | None],
    template: ChatTemplate,
    rules: RecordedRules,
    limit: int | None,
) -> TokenCounts:
    """Return the tokens of a row from its spans, if they are known. Raises ValueError for one that cannot be used."""
    sides = [_count_side(each, spans, row.thorough, template, rules, limit) for each, spans in zip(plan, cut, strict=True)]
    longest = max(sides, key=lambda side: side.length)
    return replace(longest, ends=all(side.ends for side in sides))


def _count_side(
    conversation: RecordedConversation,
    paths: Sequence[list[TokenSpan] | None] | Exception | None,
    thorough: bool,
    template: ChatTemplate,
    rules: RecordedRules,
    limit: int | None,
) -> TokenCounts:
    """Return the tokens of a conversation: of its longest path, and those of all in the loss."""
    if isinstance(paths, Exception):
        raise paths
    known = [path for path in paths or () if path is not None]
    lengths = [sum(len(span.tokens) for span in path) for path in known]
    near = limit is not None and any(abs(length - limit) <= CLOSE for length in lengths)
    if not known or len(known) < len(paths or ()) or thorough or near:
        known = encode_spans(conversation, template, rules)
    finished = [finish_spans(path, template, rules) for path in known]
    completion = sum(len(span.tokens) for _, *turns in finished for span in turns if span.in_loss)
    length = max(sum(len(span.tokens) for span in path) for path in finished)
    stops = rules.stop_ids or (template.tokenizer.eos_token_id,)
    ends = all(path[-1].tokens[-1:] in [[stop] for stop in stops] for path in finished)
    return TokenCounts(len(finished[0][0].tokens), completion, length, ends)


def _attempt(function: Callable[..., T], *arguments: Any) -> T | Exception:
    try:
        return function(*arguments)
    except Exception as error:  # chat templates may raise anything
        return error
