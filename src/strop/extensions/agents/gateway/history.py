"""Converts requests of an episode to tokens, without tokenizing sampled tokens again (law 2).

A request whose messages begin with those of an earlier one and the reply to it continues its tokens: its context, the sampled
tokens, and the later messages, encoded as an observation. Messages are compared by their fields. A reply may come back with
different surrounding white space, without its reasoning, or with different call ids: its stored tokens are still used, and that
is counted. Everything else is rendered by the chat template again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from strop.extensions.agents.gateway.exchange import Exchange
from strop.models.chat_template import ChatTemplate, ConversationError
from strop.types import Message, Messages


@dataclass(frozen=True)
class EncodedRequest:
    """The tokens of a request, and their origin."""

    tokens: list[int]
    known: int = 0  # number of messages at its beginning with stored tokens
    normalized: bool = False  # a reply came back with an insignificant change
    rewritten: bool = False  # it has replies that the policy did not give at that place


class History:
    """The answered requests of an episode."""

    def __init__(
        self, template: ChatTemplate, encode_prompt: Callable[[Messages, Sequence[Mapping[str, Any]]], list[int]]
    ) -> None:
        """``encode_prompt`` encodes messages and tools from scratch."""
        self._template, self._encode_prompt = template, encode_prompt
        self._exact: dict[bytes, Exchange] = {}  # by a digest of tools and messages, including the reply
        self._loose: dict[bytes, Exchange] = {}
        self._texts: dict[str, list[int]] = {}  # completions: prompt and reply -> tokens
        self._openings: set[str] = set()  # first messages
        self._replies: set[str] = set()

    def add(self, exchange: Exchange, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Store an answered request. If two requests have the same messages and reply, the later one is used."""
        if not exchange.messages:
            self._texts[exchange.text] = list(exchange.tokens)
            return
        *_, exact = _digest(exchange.messages, tools)
        *_, loose = _digest(exchange.messages, tools, loosely=True)
        self._exact[exact] = self._loose[loose] = exchange
        self._openings.add(_write(exchange.messages[0]))
        self._replies.add(_write(exchange.messages[-1], loosely=True))

    def encode(self, messages: tuple[Message, ...], tools: Sequence[Mapping[str, Any]] = ()) -> EncodedRequest:
        """Encode a chat request."""
        exact, loose = list(_digest(messages, tools)), list(_digest(messages, tools, loosely=True))
        for known in range(len(messages) - 1, 0, -1):
            if messages[known - 1].role != "assistant":
                continue
            found = self._exact.get(exact[known - 1])
            normalized = found is None
            found = found or self._loose.get(loose[known - 1])
            if found is not None:
                observation = self._encode_after(found, messages[known:])
                return EncodedRequest([*found.tokens, *observation], known, normalized, self._is_rewritten(messages, known))
        return EncodedRequest(self._encode_anew(messages, tools), rewritten=self._is_rewritten(messages, 0))

    def _encode_after(self, found: Exchange, messages: Messages) -> list[int]:
        """Encode the messages after a reply."""
        if not self._template.renders_tool_messages:
            messages = [
                replace(each, role="user", name="", tool_call_id="") if each.role == "tool" else each for each in messages
            ]
        calls = found.messages[-1].tool_calls if messages[0].role == "tool" else ()
        return self._template.encode_observation(messages, found.turn.tokens.tolist(), calls=calls)

    def _encode_anew(self, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        try:
            return self._encode_prompt(messages, tools)
        except ConversationError:  # the template writes no reasoning, so the policy never reads its earlier thoughts
            if not any(message.reasoning for message in messages):
                raise
            return self._encode_prompt([replace(message, reasoning="") for message in messages], tools)

    def encode_text(self, text: str) -> list[int]:
        """Encode the prompt of a completion."""
        known = max((each for each in list(self._texts) if text.startswith(each)), key=len, default="")
        tokenizer = self._template.tokenizer
        if not known:
            ids: list[int] = tokenizer(text)["input_ids"]
            return ids
        tokens = self._texts[known]
        if tokens[-1] in tokenizer.all_special_ids:  # an end-of-turn token, which is not in the text
            tokens = tokens[:-1]
        rest = text[len(known) :]
        return [*tokens, *(tokenizer(rest, add_special_tokens=False)["input_ids"] if rest else [])]

    def _is_rewritten(self, messages: tuple[Message, ...], known: int) -> bool:
        """Whether replies after the known messages are the policy's, changed or in another place; examples in a prompt do not
        count.
        """
        replies = [message for message in messages[known:] if message.role == "assistant"]
        begun = known > 0 or _write(messages[0]) in self._openings
        return any(begun or _write(reply, loosely=True) in self._replies for reply in replies)


def _digest(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, loosely: bool = False) -> Iterator[bytes]:
    """Yield a digest of the tools and the messages up to each of them."""
    state = blake2b(json.dumps(list(tools), sort_keys=True).encode(), digest_size=20)
    for message in messages:
        state.update(_write(message, loosely=loosely and message.role == "assistant").encode())
        yield state.digest()


def _write(message: Message, *, loosely: bool = False) -> str:
    """Write the compared fields of a message, unambiguously."""
    content = message.content.strip() if loosely else message.content
    calls = [[call.name, dict(call.arguments), "" if loosely else call.id] for call in message.tool_calls]
    others = [] if loosely else [message.reasoning, message.name, message.tool_call_id]
    return json.dumps([message.role, content, calls, *others], sort_keys=True) + "\n"
