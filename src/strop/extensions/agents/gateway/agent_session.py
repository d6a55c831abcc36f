"""One episode of an agent: the policy answers its requests, which become a rollout."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise
from threading import Lock
from typing import Any, Protocol

import torch

from strop.endings import Ending, failing_as
from strop.extensions.agents.gateway.exchange import Exchange
from strop.extensions.agents.gateway.gateway_config import GatewayConfig
from strop.extensions.agents.gateway.history import EncodedRequest, History
from strop.extensions.serve.completion_request import CompletionRequest, RequestReader
from strop.extensions.serve.streamed_text import cut_at_stop
from strop.generation.base import Completion, Generator, InvalidRequest, RequestTooLong
from strop.generation.policy_turn import make_policy_turn
from strop.models.chat_template import ChatTemplate
from strop.monitoring.waits import waiting
from strop.safety.site_guard import BadRequest
from strop.sampling import Sampling, mix_seed
from strop.thoughts import split_thoughts
from strop.tools.base import ParsedReply
from strop.types import Branch, Message, Messages, Rollout, Turn, observation_turn


@dataclass(eq=False)
class _Path:
    parent: int
    start: int
    tokens: tuple[int, ...]  # of the whole path, including its parents
    turns: list[Turn]
    exchanges: list[Exchange]


def add_turns(rollout: Rollout, exchanges: Sequence[Exchange]) -> Rollout:
    """Return the rollout with the prompt, turns, branches and messages of its requests. There must be at least one."""
    ordered = sorted(exchanges, key=lambda exchange: exchange.number)
    last = ordered[-1]
    chain = [each for each in ordered[:-1] if last.context[: len(each.tokens)] == each.tokens] + [last]
    main = chain[0]
    paths = [_Path(-1, 0, main.tokens, [main.turn], [main])]
    for exchange in (*chain[1:], *(each for each in ordered if each not in chain)):
        _insert(paths, exchange)
    turns = _count_messages(paths[0])
    return replace(
        rollout,
        messages=last.messages,
        prompt=torch.tensor(main.context, dtype=torch.int64),
        turns=tuple(turns),
        branches=tuple(Branch(parent=path.parent, start=path.start, turns=tuple(path.turns)) for path in paths[1:]),
    )


def _insert(paths: list[_Path], exchange: Exchange) -> None:
    context = exchange.context
    common = [count_common(context, path.tokens) for path in paths]
    best = max(common)
    ends = [index for index, path in enumerate(paths) if common[index] == best == len(path.tokens)]
    if ends:
        path = paths[ends[0]]
    else:
        parent = common.index(best)
        path = _Path(parent, best, context[:best], [], [])
        paths.append(path)
    if added := context[len(path.tokens) :]:
        path.turns.append(observation_turn(added, exchange.added_text))
    path.turns.append(exchange.turn.with_last_read(len(added) + 1))
    path.tokens = exchange.tokens
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


def _count_messages(path: _Path) -> list[Turn]:
    """Return the turns of the main path, with the number of messages each of them added, if consistent."""
    added = [len(after.messages) - len(before.messages) for before, after in pairwise(path.exchanges)]
    if not path.exchanges[-1].messages or any(count < 1 for count in added):
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


log = logging.getLogger(__name__)

CHANNEL = "<|channel|>"  # of GPT-OSS
LENGTH_KEY = "policy.max_total_sequence_length"
COUNTED = (
    "requests",
    "retries",
    "rewritten",
    "unmatched",
    "normalized",
    "overridden",
    "unenforced",
    "refused",
    "malformed_calls",
)
_said: set[str] = set()  # warnings, each once


class ToolCalling(Protocol):
    """Tools in prompts, and calls in sampled text (``strop.rollouts.tool_turns``)."""

    def describe(self, messages: Messages) -> Messages: ...

    def encode_prompt(self, messages: Messages) -> list[int]: ...

    def parse(self, turn: Turn, number: int) -> ParsedReply: ...


@dataclass(eq=False, kw_only=True)
class AgentSession:
    """The gateway's state of one episode."""

    rollout: Rollout  # without tokens
    generator: Generator
    template: ChatTemplate
    sampling: Sampling
    config: GatewayConfig
    offer_tools: Callable[[Sequence[Mapping[str, Any]]], ToolCalling]
    max_turns: int
    max_length: int  # tokens of a conversation
    exchanges: list[Exchange] = field(default_factory=list)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)  # that answer its requests
    conversations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by response id of the Responses API
    ending: Ending | None = None  # of the last request
    prompt_error: str = ""  # why the last request's prompt was refused, if it was
    failure: Exception | None = None  # of the engine

    def __post_init__(self) -> None:
        self._reader = RequestReader(
            "",
            self.template,
            self.max_length,
            length_key=LENGTH_KEY,
            takes_tools=True,
            overrides_sampling=self.config.sampling == "run",
        )
        self._history = History(self.template, self._encode_prompt)
        self._counts = dict.fromkeys(COUNTED, 0)
        self._requests = self._turns = 0
        self._lock = Lock()
        self._asked: dict[bytes, int] = {}  # contexts -> number of requests with them

    def count_request(self) -> None:
        """Count a request before it is read. Raises BadRequest if there were too many."""
        self._requests += 1
        if self._requests > self.config.max_requests:
            raise BadRequest(
                f"the episode has made {self.config.max_requests} requests, the most that gateway.max_requests allows",
                code="max_requests_exceeded",
            )

    def read(self, body: Any, *, is_chat: bool) -> tuple[CompletionRequest, EncodedRequest | None]:
        """Read a request, in any thread. Raises BadRequest."""
        encoded: list[EncodedRequest] = []

        def encode(messages: tuple[Message, ...], tools: Sequence[Any]) -> list[int]:
            encoded.append(self._history.encode(messages, tools))
            return encoded[-1].tokens

        try:
            asked = self._reader.read(body, is_chat=is_chat, encode=encode, encode_text=self._history.encode_text)
        except BadRequest as error:
            self._counts["refused"] += 1
            if error.code == "context_length_exceeded":
                self.ending, self.prompt_error = Ending.CONTEXT, str(error)
            raise
        self._take_turns(len(asked.prompts) * asked.choices)
        return asked, encoded[0] if encoded else None

    def _take_turns(self, wanted: int) -> None:
        with self._lock:
            if self._turns + wanted <= self.max_turns:
                self._turns += wanted
                return
            self._counts["refused"] += 1
            self.ending = Ending.TURNS
        raise BadRequest(
            f"the episode has had {self._turns} turns of the policy, {wanted} more are requested, and {self.max_turns} are allowed "
            "(max_rollout_turns)",
            code="max_turns_exceeded",
        )

    async def complete(
        self, asked: CompletionRequest, encoded: EncodedRequest | None
    ) -> tuple[list[Completion], list[ParsedReply]]:
        """Sample all completions of a request, in order, with their replies."""
        number = self._requests
        self._count(asked, encoded)
        try:
            sampling = self._choose_sampling(asked)
        except ValueError as error:
            raise self._refuse(error) from error
        sampled = [
            self._sample(prompt, sampling, (number, place * asked.choices + choice))
            for place, prompt in enumerate(asked.prompts)
            for choice in range(asked.choices)
        ]
        try:
            with failing_as(Ending.ENGINE):
                completions = await asyncio.gather(*sampled)
        except InvalidRequest as error:
            raise self._refuse(error) from error
        except Exception as error:  # errors of the engine, not of the agent
            self.failure = self.failure or error
            raise
        replies = [self._record(asked, encoded, number, place, completion) for place, completion in enumerate(completions)]
        return list(completions), replies

    def _refuse(self, error: ValueError) -> BadRequest:
        """Count a request that an engine cannot serve: this is the agent's error, and its rollout continues."""
        self._counts["refused"] += 1
        self.prompt_error = str(error)
        if isinstance(error, RequestTooLong):
            self.ending = Ending.CONTEXT
            return BadRequest(str(error), code="context_length_exceeded")
        return BadRequest(str(error))

    def _encode_prompt(self, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        if not tools:
            return self.template.encode_prompt(messages)
        calling = self.offer_tools(tools)
        return calling.encode_prompt(calling.describe(messages))

    def _count(self, asked: CompletionRequest, encoded: EncodedRequest | None) -> None:
        self._counts["requests"] += 1
        known = any(prompt_key(prompt) in self._asked for prompt in asked.prompts)
        self._counts["retries"] += known
        if encoded is not None:
            self._counts["rewritten"] += encoded.rewritten
            self._counts["normalized"] += encoded.normalized
            self._counts["unmatched"] += not (encoded.known or known or not self.exchanges)
        self._counts["unenforced"] += asked.must_call
        overridden = asked.sampling_parameters if self.config.sampling == "run" else ()
        self._counts["overridden"] += bool(overridden)
        if overridden and "overridden" not in _said:
            _said.add("overridden")
            log.warning(
                "an agent asks for %s; its completions are sampled with the run's own parameters, which the learner uses too "
                "(gateway.sampling)",
                ", ".join(overridden),
            )

    def _choose_sampling(self, asked: CompletionRequest) -> Sampling:
        """Return the run's sampling options within the limits of the request, or the request's if agents may choose."""
        limit = min(self.sampling.max_new_tokens, asked.sampling.max_new_tokens)
        stop = tuple(dict.fromkeys((*self.sampling.stop_strings, *asked.stop)))
        chosen = replace(self.sampling, max_new_tokens=limit, stop_strings=stop)
        if self.config.sampling == "run":
            return chosen
        given = {name: getattr(asked.sampling, name) for name in asked.sampling_parameters if hasattr(asked.sampling, name)}
        return replace(chosen, **given)

    async def _sample(self, prompt: Sequence[int], sampling: Sampling, place: tuple[int, int]) -> Completion:
        """Sample one completion. Its seed depends on the request's content, not on time (law 5)."""
        key = prompt_key(prompt)
        earlier = self._asked.get(key, 0)
        self._asked[key] = earlier + 1
        with waiting(f"sample {self.rollout.sample}", on=f"engine, request {place[0]}", kind="generation"):
            return await self.generator.generate(
                prompt,
                sampling=sampling,
                seed=mix_seed(self.rollout.seed, int.from_bytes(key, "big"), earlier),
                session=f"{self.rollout.seed:x}",
            )

    def _read_reply(self, asked: CompletionRequest, turn: Turn, completion: Completion) -> ParsedReply:
        """Parse a turn: a chat answer has separate reasoning and calls."""
        if not asked.is_chat:
            return ParsedReply(cut_at_stop(completion.text, asked.stop))
        text = cut_at_stop(turn.text, asked.stop)
        in_channels = CHANNEL in turn.text  # one of the channels has the content
        if asked.tools or in_channels:
            reply = self.offer_tools(asked.tools).parse(turn, len(self.exchanges))
            self._counts["malformed_calls"] += len(reply.malformed)
            if asked.tools and reply.calls:
                calls = reply.calls if asked.parallel_calls else reply.calls[:1]
                return replace(reply, content=cut_at_stop(reply.content, asked.stop), calls=calls)
            if in_channels and not reply.calls and not reply.malformed:
                return reply
        reasoning, content = split_thoughts(text, turn.opening)  # as written, even if a call could not be read
        return ParsedReply(content.lstrip("\n") if reasoning else content, reasoning)

    def _record(
        self,
        asked: CompletionRequest,
        encoded: EncodedRequest | None,
        number: int,
        place: int,
        completion: Completion,
    ) -> ParsedReply:
        """Store a completion, and return it in the form of the answer."""
        context = tuple(asked.prompts[place // asked.choices])
        turn = make_policy_turn(completion, context, self.template, self.generator, self.sampling)
        reply = self._read_reply(asked, turn, completion)
        if asked.is_chat:
            message = Message("assistant", reply.content, tool_calls=reply.calls, reasoning=reply.reasoning)
            known = 0 if encoded is None else encoded.known
            added = "\n".join(each.content for each in asked.messages[known:])
            exchange = Exchange(number=number, context=context, turn=turn, messages=(*asked.messages, message), added_text=added)
        else:
            prompt = asked.texts[place // asked.choices] if asked.texts else self.template.tokenizer.decode(list(context))
            exchange = Exchange(number=number, context=context, turn=turn, text=prompt + completion.text)
        self.exchanges.append(exchange)
        self._history.add(exchange, asked.tools)
        self.prompt_error = ""
        full = len(context) + len(turn.tokens) >= self.max_length
        self.ending = Ending.STOP if completion.stopped else Ending.CONTEXT if full else Ending.LENGTH
        return reply

    async def close(self) -> None:
        """Cancel unanswered requests."""
        for task in (tasks := list(self.tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def truncated(self) -> bool:
        """Whether the last request was refused, because of the length or the number of turns."""
        return self.ending in (Ending.CONTEXT, Ending.TURNS)

    def make_rollout(self) -> Rollout:
        """Return the sampled turns as a rollout. There must be an exchange."""
        rollout = add_turns(self.rollout, self.exchanges)
        counts = {**self._counts, "branches": len(rollout.branches)}
        rollout.metrics.update({f"gateway/{name}": float(value) for name, value in counts.items()})
        return replace(rollout, ending=self.ending)


def prompt_key(prompt: Sequence[int]) -> bytes:
    return blake2b(torch.tensor(prompt, dtype=torch.int64).numpy().tobytes(), digest_size=8).digest()
