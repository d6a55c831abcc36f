"""One episode of an agent: the policy answers its requests, which become a rollout."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from threading import Lock
from typing import Any

from strop.endings import Ending, failing_as
from strop.extensions.agents.episode_budget import EpisodeBudget
from strop.extensions.agents.gateway.exchange import Exchange
from strop.extensions.agents.gateway.gateway_config import GatewayConfig
from strop.extensions.agents.gateway.history import EncodedRequest, History, add_turns
from strop.extensions.serve.completion_request import CompletionRequest, RequestReader
from strop.extensions.serve.streamed_text import cut_at_stop
from strop.generation.base import Completion, Generator, InvalidRequest, RequestTooLong
from strop.models.chat_template import ChatTemplate
from strop.models.vision.image_files import EncodedPrompt
from strop.monitoring.waits import waiting
from strop.rollouts.policy_turns import ToolTurns, make_policy_turn, make_reply_message
from strop.safety.site_guard import BadRequest
from strop.sampling import Sampling, mix_seed
from strop.thoughts import split_thoughts
from strop.tools.base import ParsedReply
from strop.tools.toolbox import ToolOffer
from strop.types import Message, Messages, PromptImage, Rollout, Turn

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
    "throttled",
    "malformed_calls",
)
_said: set[str] = set()  # warnings, each once


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """What a session needs to know of its episode, in whichever process it is served."""

    seed: int
    sample: int
    sampling: Sampling
    max_turns: int
    max_length: int  # tokens of a conversation
    tool_call_format: str | None = None  # None: the format of the chat template
    budget: EpisodeBudget = field(default_factory=EpisodeBudget)


@dataclass(frozen=True, kw_only=True)
class SessionOutcome:
    """How a session ended."""

    rollout: Rollout | None = None  # with the sampled turns; None if no request was answered
    prompt_error: str = ""  # why the last request's prompt was refused, if it was
    failure: Exception | None = None  # of the engine, or of the process that served the session

    @property
    def truncated(self) -> bool:
        """Whether the last request was refused, because of the length, the number of turns or the budget."""
        return self.rollout is not None and self.rollout.ending in (Ending.CONTEXT, Ending.TURNS, Ending.BUDGET)


@dataclass(eq=False, kw_only=True)
class AgentSession:
    """The gateway's state of one episode."""

    options: SessionOptions
    generator: Generator
    template: ChatTemplate
    config: GatewayConfig
    exchanges: list[Exchange] = field(default_factory=list)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)  # that answer its requests
    conversations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by response id of the Responses API
    ending: Ending | None = None  # of the last request
    prompt_error: str = ""  # why the last request's prompt was refused, if it was
    failure: Exception | None = None  # of the engine

    def __post_init__(self) -> None:
        self._episode = copy_context()  # a request comes in the context of its connection
        self._reader = RequestReader(
            "",
            self.template,
            self.options.max_length,
            length_key=LENGTH_KEY,
            takes_tools=True,
            takes_images=self.template.vision is not None,
            overrides_sampling=self.config.sampling == "run",
        )
        self._history = History(self.template, self._encode_prompt)
        self._counts = dict.fromkeys(COUNTED, 0)
        self._requests = self._turns = 0
        self._lock = Lock()
        self._asked: dict[bytes, int] = {}  # contexts -> number of requests with them
        self._last: tuple[int, tuple[Message, ...]] = (0, ())  # number and messages of the last answered chat
        self._read_tokens = self._sampled_tokens = 0

    def count_request(self) -> None:
        """Count a request before it is read. Raises BadRequest if there were too many."""
        self._requests += 1
        if self._requests > self.config.max_requests:
            raise BadRequest(
                f"the episode has made {self.config.max_requests} requests, the most that gateway.max_requests allows",
                code="max_requests_exceeded",
            )

    def count_throttled(self) -> None:
        """Count a request that may be sent again later."""
        self._counts["throttled"] += 1

    def read(self, body: Any, *, is_chat: bool) -> tuple[CompletionRequest, EncodedRequest | None]:
        """Read a request, in any thread. Raises BadRequest."""
        encoded: list[EncodedRequest] = []
        template = choose_template(self.template, body.get("chat_template_kwargs") if isinstance(body, Mapping) else None)

        def encode(messages: tuple[Message, ...], tools: Sequence[Any]) -> list[int]:
            encoded.append(self._history.encode(messages, tools, template))
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

    def count_tokens(self, body: Any) -> int:
        """Return the number of tokens that a chat request would have, also if they are too many. Raises BadRequest."""
        counted: list[int] = []

        def encode(messages: tuple[Message, ...], tools: Sequence[Any]) -> list[int]:
            tokens = self._history.encode(messages, tools).tokens
            counted.append(len(tokens))
            return tokens

        try:
            self._reader.read(body, is_chat=True, encode=encode)
        except BadRequest:
            if not counted:
                raise
        return counted[0]

    def _take_turns(self, wanted: int) -> None:
        with self._lock:
            if self._turns + wanted <= self.options.max_turns:
                self._turns += wanted
                return
            self._counts["refused"] += 1
            self.ending = Ending.TURNS
        raise BadRequest(
            f"the episode has had {self._turns} turns of the policy, {wanted} more are requested, and {self.options.max_turns} are allowed "
            "(max_rollout_turns)",
            code="max_turns_exceeded",
        )

    async def complete(
        self, asked: CompletionRequest, encoded: EncodedRequest | None
    ) -> tuple[list[Completion], list[ParsedReply]]:
        """Sample all completions of a request, in order, with their replies."""
        number = self._requests
        self._count(asked, encoded)
        images = () if encoded is None else encoded.images
        try:
            sampling = self._choose_sampling(asked)
        except ValueError as error:
            raise self._refuse(error) from error
        sampled = [
            asyncio.create_task(self._sample(prompt, images, sampling, number), context=self._episode.copy())
            for place, prompt in enumerate(asked.prompts)
            for _ in range(asked.choices)
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

    def _offer_tools(self, tools: Sequence[Mapping[str, Any]], template: ChatTemplate | None = None) -> ToolTurns:
        return ToolTurns.make(ToolOffer(tuple(tools), "turn"), template or self.template, self.options.tool_call_format)

    def _encode_prompt(self, template: ChatTemplate, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> EncodedPrompt:
        if not tools:
            return template.encode_with_images(messages)
        calling = self._offer_tools(tools, template)
        return calling.encode_with_images(calling.describe(messages))

    def _count(self, asked: CompletionRequest, encoded: EncodedRequest | None) -> None:
        self._counts["requests"] += 1
        images = () if encoded is None else encoded.images
        known = any(prompt_key(prompt, images) in self._asked for prompt in asked.prompts)
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
        sampling, left = self.options.sampling, self._find_rest_of_budget(asked)
        limit = min(sampling.max_new_tokens, asked.sampling.max_new_tokens, *left)
        chosen = replace(sampling, max_new_tokens=limit, stop_strings=sampling.join_stops(asked.stop))
        if self.config.sampling == "run":
            return chosen
        given = {name: getattr(asked.sampling, name) for name in asked.sampling_parameters if hasattr(asked.sampling, name)}
        return replace(chosen, **given)

    def _find_rest_of_budget(self, asked: CompletionRequest) -> list[int]:
        """Return how many tokens may still be sampled; empty without a limit. Raises BadRequest if the budget is used up."""
        try:
            return self.options.budget.find_rest(self._read_tokens, self._sampled_tokens, sum(map(len, asked.prompts)))
        except ValueError as error:
            self._counts["refused"] += 1
            self.ending = Ending.BUDGET
            raise BadRequest(str(error), code="budget_exceeded") from error

    async def _sample(self, prompt: Sequence[int], images: Sequence[PromptImage], sampling: Sampling, number: int) -> Completion:
        """Sample one completion. Its seed depends on the request's content, not on time (law 5)."""
        key = prompt_key(prompt, images)
        earlier = self._asked.get(key, 0)
        self._asked[key] = earlier + 1
        shown: dict[str, Any] = {"images": images} if images else {}
        with waiting(f"sample {self.options.sample}", on=f"engine, request {number}", kind="generation"):
            return await self.generator.generate(
                prompt,
                sampling=sampling,
                seed=mix_seed(self.options.seed, int.from_bytes(key, "big"), earlier),
                session=f"{self.options.seed:x}",
                **shown,
            )

    def _read_reply(self, asked: CompletionRequest, turn: Turn, completion: Completion) -> ParsedReply:
        """Parse a turn: a chat answer has separate reasoning and calls."""
        if not asked.is_chat:
            return ParsedReply(cut_at_stop(completion.text, asked.stop))
        text = cut_at_stop(turn.text, asked.stop)
        in_channels = CHANNEL in turn.text  # one of the channels has the content
        if asked.tools or in_channels:
            reply = self._offer_tools(asked.tools).parse(turn, len(self.exchanges))
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
        context = asked.prompts[place // asked.choices]
        turn = make_policy_turn(completion, context, self.template, self.generator, self.options.sampling)
        reply = self._read_reply(asked, turn, completion)
        if encoded is not None:
            self._record_chat(asked, encoded, number, turn, make_reply_message(reply))
        else:
            exchange = Exchange(number=number, added=tuple(context), turn=turn)
            text = asked.texts[place // asked.choices] if asked.texts else self.template.tokenizer.decode(list(context))
            self.exchanges.append(exchange)
            self._history.add_text(exchange, text + completion.text)
        self.prompt_error = ""
        self._read_tokens += len(context)
        self._sampled_tokens += len(turn.tokens)
        full = len(context) + len(turn.tokens) >= self.options.max_length
        self.ending = Ending.STOP if completion.stopped else Ending.CONTEXT if full else Ending.LENGTH
        return reply

    def _record_chat(self, asked: CompletionRequest, encoded: EncodedRequest, number: int, turn: Turn, reply: Message) -> None:
        parent, messages = encoded.parent, (*asked.messages, reply)
        before = 0 if parent is None else len(parent.tokens)
        exchange = Exchange(
            number=number,
            turn=turn,
            parent=parent,
            added=tuple(encoded.tokens[before:]),
            images=tuple(image for image in encoded.images if image.start >= before),
            num_messages=len(messages),
            reply=reply,
            added_text="\n".join(each.content for each in asked.messages[encoded.known :]),
        )
        self.exchanges.append(exchange)
        self._history.add(exchange, messages, encoded.digest)
        if number >= self._last[0]:
            self._last = number, messages

    async def close(self) -> None:
        """Cancel unanswered requests."""
        for task in (tasks := list(self.tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def finish(self, rollout: Rollout) -> SessionOutcome:
        """Return the outcome, with the sampled turns added to the rollout of the episode."""
        if not self.exchanges:
            return SessionOutcome(prompt_error=self.prompt_error, failure=self.failure)
        last = max(exchange.number for exchange in self.exchanges)
        found = add_turns(rollout, self.exchanges, self._last[1] if last == self._last[0] else ())
        counts = {**self._counts, "branches": len(found.branches)}
        found.metrics.update({f"gateway/{name}": float(value) for name, value in counts.items()})
        return SessionOutcome(rollout=replace(found, ending=self.ending), prompt_error=self.prompt_error, failure=self.failure)


def choose_template(template: ChatTemplate, options: Any) -> ChatTemplate:
    """Return the template with the options that a request sets (``chat_template_kwargs``), as vLLM takes them. Raises BadRequest."""
    if not options:
        return template
    if not isinstance(options, Mapping):
        raise BadRequest("chat_template_kwargs must be an object", "chat_template_kwargs")
    return template.with_options(options)


def prompt_key(prompt: Sequence[int], images: Sequence[PromptImage] = ()) -> bytes:
    """Return a digest of a prompt."""
    state = blake2b(array("q", prompt).tobytes(), digest_size=8)
    for image in images:
        state.update(f"{image.start} {image.digest}".encode())
    return state.digest()
