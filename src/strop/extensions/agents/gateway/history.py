"""The requests of an episode as tokens, without tokenizing sampled tokens again (law 2), and as a tree: which continue which others.

A request whose messages begin with those of an earlier one and the reply to it continues its tokens: its context, the sampled
tokens, and the later messages, encoded as an observation. Messages are compared by their fields. A reply may come back with
different surrounding white space, without its reasoning, or with different call ids: its stored tokens are still used, and that
is counted. Everything else is rendered by the chat template again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise, zip_longest
from typing import Any

import torch

from strop.extensions.agents.gateway.exchange import Exchange
from strop.models.chat_template import ChatTemplate, ConversationError
from strop.models.vision.image_files import EncodedPrompt
from strop.types import Branch, Message, Messages, PromptImage, Rollout, Turn, observation_turn

Tools = Sequence[Mapping[str, Any]]


class Digest:
    """Digests of tools and messages. The loose one is equal for replies with an insignificant difference."""

    def __init__(self, tools: Tools = ()) -> None:
        self._exact = blake2b(json.dumps(list(tools), sort_keys=True).encode(), digest_size=20)
        self._loose = self._exact.copy()

    def add(self, message: Message) -> tuple[bytes, bytes]:
        """Add a message. Returns both digests of all so far."""
        written = _write(message).encode()
        self._exact.update(written)
        self._loose.update(_write(message, loosely=True).encode() if message.role == "assistant" else written)
        return self._exact.digest(), self._loose.digest()

    def after(self, message: Message) -> tuple[bytes, bytes]:
        """Return both digests with one more message, which is not added."""
        copy = Digest()
        copy._exact, copy._loose = self._exact.copy(), self._loose.copy()
        return copy.add(message)


@dataclass(frozen=True)
class EncodedRequest:
    """The tokens of a request, and their origin."""

    tokens: list[int]
    images: tuple[PromptImage, ...] = ()
    parent: Exchange | None = None  # that it continues
    known: int = 0  # number of messages at its beginning with stored tokens
    normalized: bool = False  # a reply came back with an insignificant change
    rewritten: bool = False  # it has replies that the policy did not give at that place
    digest: Digest = field(default_factory=Digest)  # of its tools and messages


class History:
    """The answered requests of an episode."""

    def __init__(self, template: ChatTemplate, encode_prompt: Callable[[ChatTemplate, Messages, Tools], EncodedPrompt]) -> None:
        """``encode_prompt`` encodes messages and tools from scratch."""
        self._template, self._encode_prompt = template, encode_prompt
        self._exact: dict[bytes, Exchange] = {}  # by a digest of tools and messages, including the reply
        self._loose: dict[bytes, Exchange] = {}
        self._texts: dict[str, list[int]] = {}  # completions: prompt and reply -> tokens
        self._openings: set[bytes] = set()  # digests of first messages
        self._replies: set[bytes] = set()

    def add(self, exchange: Exchange, messages: Messages, digest: Digest) -> None:
        """Store an answered chat, whose request has this digest. If two have the same messages and reply, the later one is used."""
        assert exchange.reply is not None
        exact, loose = digest.after(exchange.reply)
        self._exact[exact] = self._loose[loose] = exchange
        self._openings.add(_digest_of(messages[0]))
        self._replies.add(_digest_of(exchange.reply))

    def add_text(self, exchange: Exchange, text: str) -> None:
        """Store an answered completion. ``text``: prompt and reply."""
        self._texts[text] = exchange.tokens

    def encode(self, messages: tuple[Message, ...], tools: Tools = (), template: ChatTemplate | None = None) -> EncodedRequest:
        """Encode a chat request. One with another ``template`` continues none of this one."""
        template = template or self._template
        digest = Digest(tools if template is self._template else [*tools, template.options])
        digests = [digest.add(message) for message in messages]
        for known in range(len(messages) - 1, 0, -1):
            if messages[known - 1].role != "assistant":
                continue
            exact, loose = digests[known - 1]
            found = self._exact.get(exact)
            normalized = found is None
            found = found or self._loose.get(loose)
            if found is not None:
                before, observation = found.tokens, self._encode_after(template, found, messages[known:])
                images = (*found.context_images, *(image.moved(len(before)) for image in observation.images))
                rewritten = self._is_rewritten(messages, known)
                return EncodedRequest([*before, *observation.tokens], images, found, known, normalized, rewritten, digest)
        encoded = self._encode_anew(template, messages, tools)
        return EncodedRequest(encoded.tokens, encoded.images, rewritten=self._is_rewritten(messages, 0), digest=digest)

    def _encode_after(self, template: ChatTemplate, found: Exchange, messages: Messages) -> EncodedPrompt:
        """Encode the messages after a reply."""
        if not template.renders_tool_messages:
            messages = [
                replace(each, role="user", name="", tool_call_id="") if each.role == "tool" else each for each in messages
            ]
        calls = found.reply.tool_calls if found.reply is not None and messages[0].role == "tool" else ()
        return template.encode_observation_with_images(messages, found.turn.tokens.tolist(), calls=calls)

    def _encode_anew(self, template: ChatTemplate, messages: Messages, tools: Tools) -> EncodedPrompt:
        try:
            return self._encode_prompt(template, messages, tools)
        except ConversationError:  # the template writes no reasoning, so the policy never reads its earlier thoughts
            if not any(message.reasoning for message in messages):
                raise
            return self._encode_prompt(template, [replace(message, reasoning="") for message in messages], tools)

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
        if not replies:
            return False
        return (
            known > 0 or _digest_of(messages[0]) in self._openings or any(_digest_of(each) in self._replies for each in replies)
        )


def _digest_of(message: Message) -> bytes:
    return blake2b(_write(message, loosely=message.role == "assistant").encode(), digest_size=20).digest()


def _write(message: Message, *, loosely: bool = False) -> str:
    """Write the compared fields of a message, unambiguously."""
    content = message.content.strip() if loosely else message.content
    calls = [[call.name, dict(call.arguments), "" if loosely else call.id] for call in message.tool_calls]
    others = [] if loosely else [message.reasoning, message.name, message.tool_call_id]
    images = [[image.source, image.position] for image in message.images]
    return json.dumps([message.role, content, calls, *others, *images], sort_keys=True) + "\n"


Images = tuple[PromptImage, ...]


@dataclass(eq=False)
class _Path:
    parent: int
    start: int
    tokens: list[int]  # of the whole path, including its parents
    images: Images  # of the whole path
    turns: list[Turn]
    exchanges: list[Exchange]


def add_turns(rollout: Rollout, exchanges: Sequence[Exchange], messages: tuple[Message, ...] = ()) -> Rollout:
    """Return the rollout with the prompt, turns and branches of its requests, at least one. ``messages``: those of the last one."""
    ordered = sorted(exchanges, key=lambda exchange: exchange.number)
    last, last_context, last_images = ordered[-1], ordered[-1].context, ordered[-1].context_images
    chain = [each for each in ordered[:-1] if _begins(each, last_context, last_images)] + [last]
    main = chain[0]
    paths = [_Path(-1, 0, main.tokens, main.context_images, [main.turn], [main])]
    in_chain = set(map(id, chain))
    for exchange in (*chain[1:], *(each for each in ordered if id(each) not in in_chain)):
        _insert(paths, exchange)
    return replace(
        rollout,
        messages=messages,
        prompt=torch.tensor(main.context, dtype=torch.int64),
        images=main.context_images,
        turns=tuple(_count_messages(paths[0])),
        branches=tuple(Branch(parent=path.parent, start=path.start, turns=tuple(path.turns)) for path in paths[1:]),
    )


def _begins(exchange: Exchange, context: list[int], images: Images) -> bool:
    """Whether a context begins with what the exchange read and sampled."""
    tokens, own = exchange.tokens, exchange.context_images
    return context[: len(tokens)] == tokens and _same_until(own, images, len(tokens)) == len(tokens)


def _insert(paths: list[_Path], exchange: Exchange) -> None:
    context, images = exchange.context, exchange.context_images
    common = [_same_until(images, path.images, count_common(context, path.tokens)) for path in paths]
    best = max(common)
    ends = [index for index, path in enumerate(paths) if common[index] == best == len(path.tokens)]
    if ends:
        path = paths[ends[0]]
    else:
        parent = common.index(best)
        path = _Path(parent, best, context[:best], (), [], [])
        paths.append(path)
    read = len(path.tokens)
    if added := context[read:]:
        path.turns.append(observation_turn(added, exchange.added_text, [each for each in images if each.start >= read]))
    path.turns.append(exchange.turn.with_last_read(len(added) + 1))
    path.tokens, path.images = exchange.tokens, images
    path.exchanges.append(exchange)


def count_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    low, high = 0, shorter  # they agree before low, and differ at some position before high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle)
    return low


def _same_until(left: Images, right: Images, common: int) -> int:
    """Return how many of ``common`` equal tokens also stand for the same images: the tokens of two images may be equal."""
    for one, other in zip_longest(left, right):
        first = min(each.start for each in (one, other) if each is not None)
        if first >= common:
            break
        if one is None or other is None or (one.start, one.digest) != (other.start, other.digest):
            return first
    return common


def _count_messages(path: _Path) -> list[Turn]:
    """Return the turns of the main path, with the number of messages each of them added, if consistent."""
    added = [after.num_messages - before.num_messages for before, after in pairwise(path.exchanges)]
    if not path.exchanges[-1].num_messages or any(count < 1 for count in added):
        return path.turns
    numbers = iter([0, *(count - 1 for count in added)])
    turns: list[Turn] = []
    for turn in path.turns:
        if turn.sampled:
            between = next(numbers)
            if between and turns and not turns[-1].sampled:
                turns[-1] = replace(turns[-1], num_messages=between)
        turns.append(replace(turn, num_messages=1) if turn.sampled else turn)
    return turns
