"""Messages to tokens, with the tokenizer's chat template. Text becomes tokens only here (law 2).

Sampled tokens are never tokenized again. An observation is tokenized alone, as the part of the rendered template between the end of the
policy's turn and the start of its next one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from strop.types import Message, Messages, assistant, user

# A reply that no template changes and no conversation contains. The rendered text around it is the same for every reply.
_REPLY_MARKER = "\u241e\u2418\u241e"
_CONTEXT_CHARACTERS = 64  # characters before a text that can affect how it is tokenized


@dataclass(frozen=True)
class TokenSpan:
    """A part of a recorded conversation, and whether its tokens are in the loss."""

    tokens: list[int]
    in_loss: bool
    text: str


class ConversationError(ValueError):
    """The chat template cannot split a recorded conversation into loss tokens and context."""


class ChatTemplate:
    """Renders prompts and observations as token ids."""

    def __init__(self, tokenizer: Any, *, options: Mapping[str, Any] | None = None) -> None:
        """``options`` are passed to the template, such as ``enable_thinking``.

        Without a template, messages are joined as plain text and a warning is issued.
        """
        self.tokenizer = tokenizer
        self.options = dict(options or {})
        self.joins_plain_text = not getattr(tokenizer, "chat_template", None)
        if self.joins_plain_text:
            warnings.warn(
                "the tokenizer has no chat template: messages are joined as plain text; set policy.tokenizer.chat_template to change that",
                stacklevel=2,
            )

    def encode_prompt(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Encode the conversation so far and the start of the policy's turn. Raises ValueError if it is empty.

        ``tools`` are the schemas of what the policy may call, as OpenAI's API takes them.
        """
        if not messages:
            raise ValueError("a prompt needs at least one message; the environment returned none")
        if self.joins_plain_text:
            ids: list[int] = self.tokenizer(_join_messages(messages))["input_ids"]
            return ids
        return self._encode(self._render(messages, open_turn=True, tools=tools))

    def encode_observation(self, messages: Messages, sampled: Sequence[int]) -> list[int]:
        """Encode the tokens to append to the policy's turn ``sampled``.

        They are the end of that turn (unless it was sampled), the messages, and the start of a new turn.
        """
        if self.joins_plain_text:
            return self._encode("\n" + _join_messages(messages) + "\n")
        context = [Message("user", "?"), Message("assistant", _REPLY_MARKER)]
        rendered = self._render([*context, *messages], open_turn=True)
        _, marker, rest = rendered.partition(_REPLY_MARKER)
        if not marker:
            raise ValueError(
                "the chat template does not render an assistant's message as it is written, so a conversation cannot be continued as "
                "tokens; set policy.tokenizer.chat_template to one that does, or allow only one turn"
            )
        ids = self._encode(rest)
        return ids[1:] if sampled and ids and ids[0] == sampled[-1] else ids

    def encode_conversation(self, messages: Messages, *, trailing: bool = True) -> list[int]:
        """Encode a complete conversation, for a reward model. Without ``trailing``, the template's trailing white space is left out."""
        text = _join_messages(messages) if self.joins_plain_text else self._render(messages, open_turn=False)
        return self._encode(text if trailing else text.rstrip())

    def encode_spans(self, messages: Messages, *, loss_from: int = 0, opened: bool = True) -> list[TokenSpan]:
        """Split a recorded conversation into spans: a prompt, then loss spans and context spans in alternation.

        Joined, the texts of the spans are the rendered conversation. The loss covers the assistant's messages from index ``loss_from`` on,
        except one that opens the conversation. Each begins where sampling would begin, after ``encode_prompt(messages before it)``, and
        ends with the special token that ends a turn in the template, if there is one. The first span has exactly the tokens of the prompt
        of the first such message. With ``opened=False``, what the template writes to open a turn is in the loss, too, as if the policy
        had generated it. Raises ConversationError if the template renders a turn differently from how it would have been sampled.
        """
        turns = [index for index, message in enumerate(messages) if message.role == "assistant" and index >= max(loss_from, 1)]
        if not turns:
            raise ConversationError(
                "the conversation has no assistant message that follows another message, so there are no loss tokens"
            )
        if self.joins_plain_text:
            return self._plain_spans(messages, turns)
        rendered = self._render(messages, open_turn=False)
        cuts = [cut for turn in turns for cut in self._reply_bounds(messages, turn, rendered, opened=opened)]
        if any(left > right for left, right in pairwise(cuts)):
            raise ConversationError(_rewritten_message(messages, turns[0]))
        return self._spans(
            [rendered[start:end] for start, end in pairwise([0, *cuts, len(rendered)])], self._encode(rendered[: cuts[0]])
        )

    def _reply_bounds(self, messages: Messages, turn: int, rendered: str, *, opened: bool) -> tuple[int, int]:
        """Return where the part of message ``turn`` that the policy generates begins and ends in the rendered text."""
        prompt = self._render(messages[:turn], open_turn=opened)
        through_reply = rendered if turn + 1 == len(messages) else self._render(messages[: turn + 1], open_turn=False)
        suffix, generated = self._reply_suffix
        end = len(through_reply) - len(suffix)
        if not through_reply.startswith(prompt):
            raise ConversationError(_opening_mismatch_message(turn, prompt, through_reply))
        if not through_reply.endswith(suffix) or end < len(prompt):
            raise ConversationError(
                f"the chat template ends message {turn + 1} with {through_reply[-40:]!r}, and other replies with {suffix[-40:]!r}: it is "
                "unclear where the reply ends; set policy.tokenizer.chat_template to one that ends all replies alike"
            )
        end += generated
        if not rendered.startswith(through_reply[:end]):
            raise ConversationError(_rewritten_message(messages, turn))
        return len(prompt), end

    @cached_property
    def _reply_suffix(self) -> tuple[str, int]:
        """The text that the template adds after a reply, and the number of its characters that the policy generates.

        The policy generates the text up to and including the first special token.
        """
        rendered = self._render([user("?"), assistant(_REPLY_MARKER)], open_turn=False)
        _, marker, suffix = rendered.rpartition(_REPLY_MARKER)
        if not marker:
            raise ConversationError(
                "the chat template does not render an assistant's message as it is written; "
                "set policy.tokenizer.chat_template to one that does"
            )
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        special = {*self.tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        start, length = min(
            ((suffix.index(token), -len(token)) for token in special if token and token in suffix), default=(0, 0)
        )
        return suffix, start - length

    def _plain_spans(self, messages: Messages, turns: Sequence[int]) -> list[TokenSpan]:
        """Split plain text joined as in ``encode_prompt`` and ``encode_observation``.

        A reply follows its prompt directly, and later messages start on new lines.
        """
        texts = [_join_messages(messages[: turns[0]])]
        for turn, following in pairwise([*turns, len(messages)]):
            between = messages[turn + 1 : following]
            texts += [messages[turn].content, f"\n{_join_messages(between)}\n" if between or following < len(messages) else ""]
        return self._spans(texts, self.encode_prompt(messages[: turns[0]]))

    def _spans(self, texts: Sequence[str], prompt: list[int]) -> list[TokenSpan]:
        """Return the spans of ``texts``, of which every second one is in the loss. An empty last text is left out."""
        spans = [TokenSpan(prompt, False, texts[0])]
        for index, (preceding, text) in enumerate(pairwise(texts), start=1):
            spans.append(TokenSpan(self._encode_continuation(preceding, text), index % 2 == 1, text))
        return spans if texts[-1] else spans[:-1]

    def _encode_continuation(self, preceding: str, text: str) -> list[int]:
        """Encode ``text`` as a continuation of ``preceding``, or alone if the two would share a token.

        Some tokenizers mark the start of their input as the start of a word, which is wrong for a continuation.
        """
        preceding = preceding[-_CONTEXT_CHARACTERS:]
        preceding_ids, joined = self._encode(preceding), self._encode(preceding + text)
        return joined[len(preceding_ids) :] if joined[: len(preceding_ids)] == preceding_ids else self._encode(text)

    def _render(self, messages: Messages, *, open_turn: bool, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        options = {**self.options, "tools": [dict(tool) for tool in tools]} if tools else self.options
        text: str = self.tokenizer.apply_chat_template(
            [message.as_dict() for message in messages], add_generation_prompt=open_turn, tokenize=False, **options
        )
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _join_messages(messages: Messages) -> str:
    return "\n".join(message.content for message in messages)


def _opening_mismatch_message(turn: int, prompt: str, rendered: str) -> str:
    common = next((index for index, (left, right) in enumerate(zip(prompt, rendered, strict=False)) if left != right), 0)
    return (
        f"the chat template opens message {turn + 1} with {prompt[common:][-40:]!r} when it is to be sampled, and renders it as "
        f"{rendered[common:][:40]!r}: the loss tokens would differ from what the policy samples there. Begin the message as the template "
        "opens it, or set policy.tokenizer.chat_template_kwargs (such as enable_thinking: false) or policy.tokenizer.chat_template"
    )


def _rewritten_message(messages: Messages, turn: int) -> str:
    return (
        f"the chat template renders message {turn + 1} of {len(messages)} differently when more messages follow, as templates do "
        "that drop earlier reasoning: the loss tokens would differ from what the policy samples there. Train on the last turn only "
        "(sft.only_unmask_final=true), or set policy.tokenizer.chat_template to a template that does not change earlier turns"
    )
