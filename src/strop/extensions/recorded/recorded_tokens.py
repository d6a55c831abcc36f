"""The tokens of recorded conversations, without tensors, so that worker processes that make them need not load torch."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, takewhile
from typing import Any

from strop.models.chat_template import ChatTemplate, TokenSpan
from strop.types import Message, PromptImage


@dataclass(frozen=True, kw_only=True)
class RecordedRules:
    """Options for turning a recorded conversation into tokens."""

    max_length: int  # tokens of prompt and completion together
    final_turn_only: bool = False  # only the last assistant turn is in the loss (sft.only_unmask_final)
    add_bos: bool = False  # begin with the tokenizer's bos_token if the template does not
    add_generation_prompt: bool = True  # what opens an assistant turn is context; else it is in the loss
    add_eos: bool = True  # end the last turn in the loss with a stop token if the template does not
    stop_ids: tuple[int, ...] = ()  # the model's stop tokens; empty: the tokenizer's end of sequence

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError(
                f"max_length is {self.max_length}; it must be at least 2: one token of the prompt and one to predict"
            )


class ExampleTooLong(ValueError):
    """An example exceeds the maximum length. Its group is dropped and counted."""


@dataclass(frozen=True)
class RecordedConversation:
    """Messages whose assistant turns are in the loss, from the index ``loss_from`` on; or a raw text, all of it in the loss."""

    messages: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]] = ()
    loss_from: int = 0
    raw_text: str | None = None


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A span of tokens after the prompt."""

    tokens: array[int]
    in_loss: bool
    text: str
    images: tuple[PromptImage, ...] = ()  # positions count from the conversation's first token


@dataclass(frozen=True, slots=True)
class RecordedBranch:
    """Turns that the template renders differently once the conversation goes on, starting after ``start`` tokens of it."""

    start: int
    turns: tuple[RecordedTurn, ...]


@dataclass(frozen=True, slots=True)
class TokenizedConversation:
    prompt: array[int]
    turns: tuple[RecordedTurn, ...]
    images: tuple[PromptImage, ...] = ()  # of the prompt
    branches: tuple[RecordedBranch, ...] = ()


def tokenize_group(
    conversations: Sequence[RecordedConversation], template: ChatTemplate, rules: RecordedRules
) -> list[TokenizedConversation] | str:
    """Return the tokens of a group's conversations, or why one of them cannot be used.

    All exceptions are caught, because a chat template may raise any.
    """
    try:
        return [tokenize_conversation(each, template, rules) for each in conversations]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def tokenize_conversation(
    conversation: RecordedConversation, template: ChatTemplate, rules: RecordedRules
) -> TokenizedConversation:
    """Return the tokens of a conversation. Raises ValueError for one that cannot be used."""
    (prompt, *spans), *others = [finish_spans(path, template, rules) for path in encode_spans(conversation, template, rules)]
    whole = _join_tokens([prompt, *spans])
    return TokenizedConversation(
        array("q", prompt.tokens),
        _make_turns(spans, len(prompt.tokens), template),
        prompt.images,
        tuple(_make_branch(path, whole, template) for path in others),
    )


def _make_branch(path: Sequence[TokenSpan], whole: Sequence[int], template: ChatTemplate) -> RecordedBranch:
    """Return the part of a path that the conversation lacks: its loss tokens, and the prompt from where they differ."""
    prompt, *spans = path
    start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt.tokens, whole, strict=False)))
    if start < len(prompt.tokens):
        images = tuple(image.moved(-start) for image in prompt.images if image.start >= start)
        rest = prompt.tokens[start:]
        spans = [TokenSpan(rest, False, template.tokenizer.decode(rest, skip_special_tokens=False), images), *spans]
    return RecordedBranch(start, _make_turns(spans, start, template))


def _join_tokens(spans: Sequence[TokenSpan]) -> list[int]:
    return [token for span in spans for token in span.tokens]


def finish_spans(encoded: Sequence[TokenSpan], template: ChatTemplate, rules: RecordedRules) -> list[TokenSpan]:
    """Return the spans of a path from its prompt to its last loss token, adding tokens that begin and end it.

    Raises ValueError for a conversation that cannot be used.
    """
    eos: int | None = template.tokenizer.eos_token_id
    stops = rules.stop_ids or (() if eos is None else (eos,))
    prompt, *spans = encoded
    if rules.add_bos:
        prompt = _prepend_bos(prompt, template.tokenizer.bos_token_id)
    if not prompt.tokens:
        raise ValueError("its prompt has no tokens, but the first loss token is predicted from the last token of the prompt")
    spans = _move_stop_tokens(spans, stops)
    while not spans[-1].in_loss:
        spans.pop()  # nothing is predicted after the last loss token
    if rules.add_eos:
        spans[-1] = _append_stop_token(spans[-1], eos, stops)
    if not any(span.tokens for span in spans if span.in_loss):
        raise ValueError("it has no loss tokens")
    length = len(prompt.tokens) + sum(len(span.tokens) for span in spans)
    if length > rules.max_length:
        raise ExampleTooLong(
            f"it has {length} tokens ({len(prompt.tokens)} of them in the prompt), and at most {rules.max_length} fit "
            "(policy.max_total_sequence_length)"
        )
    return [prompt, *spans]


def encode_spans(conversation: RecordedConversation, template: ChatTemplate, rules: RecordedRules) -> list[list[TokenSpan]]:
    """Return the tokens of a conversation as split by the chat template, the path of the last turn first. Raises ValueError."""
    if conversation.raw_text is None:
        return template.encode_spans(
            conversation.messages, loss_from=conversation.loss_from, opened=rules.add_generation_prompt, tools=conversation.tools
        )
    # Includes the special tokens that the tokenizer adds around a text. Nothing predicts the first one.
    tokens: list[int] = template.tokenizer(conversation.raw_text)["input_ids"]
    return [[TokenSpan(tokens[:1], False, ""), TokenSpan(tokens[1:], True, conversation.raw_text)]]


def _make_turns(spans: Sequence[TokenSpan], start: int, template: ChatTemplate) -> tuple[RecordedTurn, ...]:
    starts = accumulate((len(span.tokens) for span in spans), initial=start)
    return tuple(_make_turn(span, start, template) for span, start in zip(spans, starts, strict=False))


def _make_turn(span: TokenSpan, start: int, template: ChatTemplate) -> RecordedTurn:
    text = template.tokenizer.decode(span.tokens, skip_special_tokens=True) if span.in_loss else span.text
    return RecordedTurn(array("q", span.tokens), span.in_loss, text, tuple(image.moved(start) for image in span.images))


def _move_stop_tokens(spans: Sequence[TokenSpan], stops: Sequence[int]) -> list[TokenSpan]:
    """Move a stop token that starts the span after a reply into the reply. In some templates (GLM) the next turn's opening ends it."""
    spans = list(spans)
    for index, (reply, following) in enumerate(pairwise(spans)):
        starts_with_stop = bool(following.tokens) and following.tokens[0] in stops
        if reply.in_loss and starts_with_stop and (not reply.tokens or reply.tokens[-1] not in stops):
            spans[index] = replace(reply, tokens=[*reply.tokens, following.tokens[0]])
            images = tuple(image.moved(-1) for image in following.images)
            spans[index + 1] = replace(following, tokens=following.tokens[1:], images=images)
    return spans


def _prepend_bos(prompt: TokenSpan, bos: int | None) -> TokenSpan:
    """Prepend the BOS token to the conversation, if the tokenizer has one and the template did not write it."""
    if bos is None or prompt.tokens[:1] == [bos]:
        return prompt
    return replace(prompt, tokens=[bos, *prompt.tokens], images=tuple(image.moved(1) for image in prompt.images))


def _append_stop_token(reply: TokenSpan, eos: int | None, stops: Sequence[int]) -> TokenSpan:
    """End the reply with a stop token, without which the model would not learn to stop. Raises ValueError if there is none."""
    if not stops:
        raise ValueError("there is no stop token to end it with: set the tokenizer's eos_token, or data.add_eos=false")
    if reply.tokens and reply.tokens[-1] in stops:
        return reply
    return replace(reply, tokens=[*reply.tokens, eos if eos is not None and eos in stops else stops[0]])
