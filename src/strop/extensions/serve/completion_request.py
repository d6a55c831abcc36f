"""Parses requests of OpenAI's API into tokens, sampling options and messages."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.extensions.serve.chat_message import read_messages, read_tools
from strop.models.chat_template import ChatTemplate
from strop.safety.site_guard import BadRequest
from strop.sampling import Sampling, is_encodable, is_finite, is_whole, shown
from strop.types import Message

MAX_PROMPTS, MAX_CHOICES = 2048, 128
Neutral = Mapping[str, Sequence[Any]]  # parameter -> values that have no effect
PENALTIES: Neutral = {"presence_penalty": (None, 0, 0.0), "frequency_penalty": (None, 0, 0.0)}
NOT_SUPPORTED: Neutral = {
    "functions": (None, []),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "top_logprobs": (None, 0),
}
SAMPLING_PARAMETERS = ("temperature", "top_p", "top_k", "min_p", "seed", *PENALTIES)  # they change the distribution, or the draw


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """Prompts as tokens, and how to continue each."""

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    stop: Sequence[str]
    choices: int  # completions of each prompt
    seed: int
    stream: bool
    include_usage: bool
    logprobs: bool
    is_chat: bool
    messages: tuple[Message, ...] = ()  # of a chat
    texts: tuple[str, ...] = ()  # for completions whose prompts are texts
    tools: Sequence[Mapping[str, Any]] = ()  # available to the policy
    parallel_calls: bool = True  # more than one in a turn
    must_call: bool = False  # at least one, or a specific one
    sampling_parameters: tuple[str, ...] = ()  # those set by the request


Encode = Callable[[tuple[Message, ...], Sequence[Mapping[str, Any]]], Sequence[int]]  # of messages and tools
EncodeText = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class RequestReader:
    """Reads requests for one model. Raises BadRequest."""

    model: str
    template: ChatTemplate
    max_length: int  # tokens of prompt and completion together
    length_key: str = "--max-model-len"  # what sets it
    takes_tools: bool = False
    takes_images: bool = False
    overrides_sampling: bool = False  # the request's parameters that change the distribution have no effect

    def read(
        self, body: Any, *, is_chat: bool, encode: Encode | None = None, encode_text: EncodeText | None = None
    ) -> CompletionRequest:
        """Read a request. ``encode`` and ``encode_text`` tokenize conversations and texts; default: the tokenizer's."""
        if not isinstance(body, Mapping):
            raise BadRequest("the request must be a JSON object")
        self._check_supported(body)
        messages = read_messages(body.get("messages")) if is_chat else ()
        tools = read_tools(body)
        if not self.takes_images and any(message.images for message in messages):
            raise BadRequest("a message has an image, and the model reads only text (docs/images.md)", "messages")
        if is_chat:
            self._check_characters((*(message.content for message in messages), tools), "messages")
            prompts: Sequence[Sequence[int]] = [self._encode_messages(messages, tools, encode)]
        else:
            prompts = self._encode_prompts(body.get("prompt"), encode_text or self.encode_text)
        for prompt in prompts:
            self._check_length(len(prompt), "messages" if is_chat else "prompt")
        room = self.max_length - max(map(len, prompts))
        stop = _read_stop(body.get("stop"))
        asked = body.get("max_completion_tokens")
        asked = body.get("max_tokens") if asked is None else asked
        if asked is None and not is_chat:
            asked = 16  # OpenAI's default
        limit = room if asked is None else min(_number(asked, "max_tokens", int, lowest=1), room)
        options = body.get("stream_options") or {}
        given = body.get("prompt")
        texts = [text for text in (given if isinstance(given, list) else [given]) if isinstance(text, str)]
        return CompletionRequest(
            prompts=prompts,
            sampling=self._make_sampling(body, limit, stop),
            stop=stop,
            choices=_read(body, "n", int, 1, lowest=1, highest=MAX_CHOICES),
            seed=_read(body, "seed", int, random.getrandbits(62)),
            stream=_read(body, "stream", bool, False),
            include_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
            logprobs=body.get("logprobs") is not None and body["logprobs"] is not False,  # 0 requests them too
            is_chat=is_chat,
            messages=messages,
            texts=() if is_chat else tuple(texts),
            tools=tools,
            parallel_calls=_read(body, "parallel_tool_calls", bool, True),
            must_call=bool(tools) and body.get("tool_choice") not in (None, "auto", "none"),
            sampling_parameters=tuple(name for name in SAMPLING_PARAMETERS if body.get(name) is not None),
        )

    def _check_supported(self, body: Mapping[str, Any]) -> None:
        self._check_model(body.get("model"))
        neutral = {**NOT_SUPPORTED, **({} if self.takes_tools else {"tools": (None, [])})}
        neutral |= {} if self.overrides_sampling else PENALTIES
        for name, values in neutral.items():
            if body.get(name) not in values:
                raise BadRequest(
                    f"{name} is not supported by the torch engine; `strop serve --engine vllm` may support it"
                    if not self.takes_tools
                    else f"{name} is not supported while a policy is trained: its tokens are sampled from the run's own distribution",
                    name,
                )

    def _check_model(self, name: Any) -> None:
        if self.model and name not in (None, self.model):
            raise BadRequest(
                f"the model {name!r} does not exist; this server has {self.model!r}", "model", status=404, code="model_not_found"
            )

    def _check_length(self, tokens: int, param: str, about: str = "") -> None:
        if not tokens:
            raise BadRequest("the prompt is empty", param)
        if tokens >= self.max_length:
            raise BadRequest(
                f"the prompt has {about}{tokens} tokens and the server allows {self.max_length} for prompt and completion together "
                f"({self.length_key})",
                param,
                code="context_length_exceeded",
            )

    def _check_characters(self, texts: Any, param: str) -> None:
        """Refuse texts that are too long however they are tokenized, because tokenizing takes a second per megabyte."""
        characters = _count_characters(texts)
        if characters >= self.max_length * (longest := self.template.longest_token):
            self._check_length(characters // longest, param, f"{characters} characters, at least ")

    def _make_sampling(self, body: Mapping[str, Any], limit: int, stop: tuple[str, ...]) -> Sampling:
        top_k = _read(body, "top_k", int, -1)
        try:
            return Sampling(
                temperature=_read(body, "temperature", float, 1.0, lowest=0, highest=2),
                top_p=_read(body, "top_p", float, 1.0, lowest=1e-6, highest=1),
                top_k=None if top_k < 1 else top_k,
                min_p=_read(body, "min_p", float, 0.0, lowest=0, highest=1),
                max_new_tokens=limit,
                stop_strings=stop,
            )
        except BadRequest:
            raise
        except ValueError as error:
            raise BadRequest(str(error)) from error

    def _encode_messages(
        self, messages: tuple[Message, ...], tools: Sequence[Mapping[str, Any]], encode: Encode | None
    ) -> Sequence[int]:
        try:
            return (encode or self.template.encode_prompt)(messages, tools)
        except Exception as error:  # a template may raise any exception
            raise BadRequest(
                f"the chat template does not accept these messages: {type(error).__name__}: {error}", "messages"
            ) from error

    def _encode_prompts(self, prompt: Any, encode: EncodeText) -> list[Sequence[int]]:
        prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str) else [prompt]
        if len(prompts) > MAX_PROMPTS:
            raise BadRequest(f"there are {len(prompts)} prompts; a request may have {MAX_PROMPTS}", "prompt")
        return [self._encode_prompt(each, encode) for each in prompts]

    def _encode_prompt(self, prompt: Any, encode: EncodeText) -> Sequence[int]:
        if isinstance(prompt, str):
            self._check_characters(prompt, "prompt")
            try:
                return encode(prompt)
            except (TypeError, ValueError) as error:  # a lone surrogate
                raise BadRequest(f"the prompt cannot be read by the tokenizer: {error}", "prompt") from error
        if not isinstance(prompt, list):
            raise BadRequest("prompt must be a text, a list of token ids, or a list of these", "prompt")
        self._check_length(len(prompt), "prompt")
        last = len(self.template.tokenizer) - 1
        for token in prompt:
            if not is_whole(token, 0, last):
                raise BadRequest(f"the prompt holds {shown(token)}; token ids are whole numbers of 0 to {last}", "prompt")
        return prompt

    def encode_text(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self.template.tokenizer(text)["input_ids"]
        return ids


def _count_characters(value: Any) -> int:
    """Return the number of characters in the texts of a JSON value."""
    count, left = 0, [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            count += len(each)
        elif isinstance(each, Mapping):
            left.extend((*each, *each.values()))
        elif isinstance(each, list | tuple):
            left.extend(each)
    return count


def _read_stop(stop: Any) -> tuple[str, ...]:
    found = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise BadRequest("stop must be a text or a list of texts", "stop")
    if not all(map(is_encodable, found)):
        raise BadRequest("stop has a lone surrogate, which is not text", "stop")
    return tuple(each for each in found if each)


def _read(body: Mapping[str, Any], name: str, kind: Callable[[Any], Any], default: Any, **limits: float) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if kind is bool:
        if not isinstance(value, bool):
            raise BadRequest(f"{name} must be true or false; found {shown(value)}", name)
        return value
    return _number(value, name, kind, **limits)


def _number(
    value: Any, name: str, kind: Callable[[Any], Any], *, lowest: float | None = None, highest: float | None = None
) -> Any:
    if not is_finite(value) or (kind is int and value != int(value)):
        raise BadRequest(f"{name} must be {'a whole number' if kind is int else 'a number'}; found {shown(value)}", name)
    if (lowest is not None and value < lowest) or (highest is not None and value > highest):
        limits = f"at least {lowest:g}" if highest is None else f"between {lowest or 0:g} and {highest:g}"
        raise BadRequest(f"{name} must be {limits}; found {shown(value)}", name)
    return kind(value)
