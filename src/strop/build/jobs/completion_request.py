"""Requests of OpenAI's API, as far as the torch engine can answer them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.models.chat_template import ChatTemplate
from strop.sampling import Sampling
from strop.types import Message

MAX_CHOICES = 128
NOT_SUPPORTED: Mapping[str, Sequence[Any]] = {  # parameter -> its values that change nothing
    "tools": (None, []),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "response_format": (None, {"type": "text"}),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "top_logprobs": (None, 0),
}


class BadRequest(ValueError):
    """A request that cannot be answered: what was found, and why not."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """Prompts as tokens, and how each is continued."""

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    stop: Sequence[str]
    choices: int  # completions of each prompt
    seed: int
    stream: bool
    include_usage: bool
    logprobs: bool
    is_chat: bool


@dataclass(frozen=True)
class RequestReader:
    """Reads requests for one model. Raises BadRequest."""

    model: str
    template: ChatTemplate
    max_length: int  # tokens of prompt and completion together

    def read(self, body: Any, *, is_chat: bool) -> CompletionRequest:
        if not isinstance(body, Mapping):
            raise BadRequest("the request must be a JSON object")
        self._check_model(body.get("model"))
        for name, neutral in NOT_SUPPORTED.items():
            if body.get(name) not in neutral:
                raise BadRequest(f"{name} is not supported by the torch engine; `strop serve --engine vllm` may support it", name)
        prompts = [self._encode_messages(body)] if is_chat else self._encode_prompts(body.get("prompt"))
        for prompt in prompts:
            self._check_length(prompt, "messages" if is_chat else "prompt")
        room = self.max_length - max(map(len, prompts))
        stop = _read_stop(body.get("stop"))
        asked = body.get("max_completion_tokens")
        asked = body.get("max_tokens") if asked is None else asked
        if asked is None and not is_chat:
            asked = 16  # OpenAI's default
        limit = room if asked is None else min(_number(asked, "max_tokens", int, lowest=1), room)
        options = body.get("stream_options") or {}
        return CompletionRequest(
            prompts=prompts,
            sampling=self._make_sampling(body, limit, stop),
            stop=stop,
            choices=_read(body, "n", int, 1, lowest=1, highest=MAX_CHOICES),
            seed=_read(body, "seed", int, random.getrandbits(62)),
            stream=_read(body, "stream", bool, False),
            include_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
            logprobs=body.get("logprobs") is not None and body["logprobs"] is not False,  # 0 asks for them too
            is_chat=is_chat,
        )

    def _check_model(self, name: Any) -> None:
        if name not in (None, self.model):
            raise BadRequest(
                f"the model {name!r} does not exist; this server has {self.model!r}", "model", status=404, code="model_not_found"
            )

    def _check_length(self, prompt: Sequence[int], param: str) -> None:
        if not prompt:
            raise BadRequest("the prompt is empty", param)
        if len(prompt) >= self.max_length:
            raise BadRequest(
                f"the prompt has {len(prompt)} tokens and the server allows {self.max_length} for prompt and completion together "
                "(--max-model-len)",
                param,
                code="context_length_exceeded",
            )

    def _make_sampling(self, body: Mapping[str, Any], limit: int, stop: tuple[str, ...]) -> Sampling:
        top_k = _read(body, "top_k", int, -1)
        return Sampling(
            temperature=_read(body, "temperature", float, 1.0, lowest=0, highest=2),
            top_p=_read(body, "top_p", float, 1.0, lowest=1e-6, highest=1),
            top_k=None if top_k < 1 else top_k,
            min_p=_read(body, "min_p", float, 0.0, lowest=0, highest=1),
            max_new_tokens=limit,
            stop_strings=stop,
        )

    def _encode_messages(self, body: Mapping[str, Any]) -> Sequence[int]:
        found = body.get("messages")
        if not isinstance(found, list) or not found:
            raise BadRequest("messages must be a list of at least one message", "messages")
        messages = [_read_message(message, index) for index, message in enumerate(found)]
        try:
            return self.template.encode_prompt(messages)
        except Exception as error:  # a template may raise anything
            raise BadRequest(
                f"the chat template does not accept these messages: {type(error).__name__}: {error}", "messages"
            ) from error

    def _encode_prompts(self, prompt: Any) -> list[Sequence[int]]:
        prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
        return [self._encode_text(each) for each in prompts]

    def _encode_text(self, prompt: Any) -> Sequence[int]:
        tokenizer = self.template.tokenizer
        if isinstance(prompt, str):
            ids: Sequence[int] = tokenizer(prompt)["input_ids"]
            return ids
        if isinstance(prompt, list) and all(isinstance(token, int) and 0 <= token < len(tokenizer) for token in prompt):
            return prompt
        raise BadRequest("prompt must be a text, a list of token ids, or a list of these", "prompt")


def _read_message(message: Any, index: int) -> Message:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequest(f"{where} must have a role and a content", where)
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise BadRequest(f"{where}.content must be a text or a list of texts", where)
    return Message(message["role"], content)


def _read_stop(stop: Any) -> tuple[str, ...]:
    found = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise BadRequest("stop must be a text or a list of texts", "stop")
    return tuple(each for each in found if each)


def _read(body: Mapping[str, Any], name: str, kind: Callable[[Any], Any], default: Any, **limits: float) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if kind is bool:
        if not isinstance(value, bool):
            raise BadRequest(f"{name} must be true or false; found {value!r}", name)
        return value
    return _number(value, name, kind, **limits)


def _number(
    value: Any, name: str, kind: Callable[[Any], Any], *, lowest: float | None = None, highest: float | None = None
) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value != value or (kind is int and value != int(value)):
        raise BadRequest(f"{name} must be {'a whole number' if kind is int else 'a number'}; found {value!r}", name)
    if (lowest is not None and value < lowest) or (highest is not None and value > highest):
        limits = f"at least {lowest:g}" if highest is None else f"between {lowest or 0:g} and {highest:g}"
        raise BadRequest(f"{name} must be {limits}; found {value!r}", name)
    return kind(value)
