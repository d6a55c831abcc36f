"""Anthropic's Messages API on top of chat completions: content blocks to messages, replies to blocks, stream events, errors."""

from __future__ import annotations

import json
import uuid
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from strop.extensions.serve.http_api import format_error
from strop.extensions.serve.streamed_text import cut_at_stop
from strop.generation.base import Completion
from strop.safety.site_guard import BadRequest
from strop.tools.base import ParsedReply
from strop.types import ToolCall

SAME_NAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
BILLING_HEADER = (
    "x-anthropic-billing-header:"  # a system block of Claude Code that differs between requests and is not for the model
)
ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 529: "overloaded_error",
}  # fmt: skip
CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # tool_choice, and its name in OpenAI's API


def make_chat_body(body: Any) -> dict[str, Any]:
    """Return the equivalent body of a chat completion request. Raises BadRequest."""
    if not isinstance(body, Mapping):
        raise BadRequest("the request must be a JSON object")
    for name, neutral in (("mcp_servers", (None, [])), ("container", (None,))):
        if body.get(name) not in neutral:
            raise BadRequest(f"{name} is not supported: the policy has only the tools that the agent runs itself", name)
    output, messages = body.get("output_config"), body.get("messages")
    if isinstance(output, Mapping) and output.get("format") is not None:
        raise BadRequest(
            "output_config.format is not supported: tokens are sampled from the run's own distribution", "output_config"
        )
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message", "messages")
    chat = {name: body[name] for name in SAME_NAME if body.get(name) is not None}
    chat["stop"] = body.get("stop_sequences")
    chat["messages"] = [*_read_system(body.get("system"))]
    for index, message in enumerate(messages):
        chat["messages"] += _read_message(message, f"messages[{index}]")
    if chat["messages"][-1]["role"] == "assistant":
        raise BadRequest("the last message is the assistant's: prefilling a reply is not supported", "messages")
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list", "tools")
    chat["tools"] = [_read_tool(tool, index) for index, tool in enumerate(tools)]
    _read_choice(body.get("tool_choice"), chat)
    return chat


def _read_system(system: Any) -> Iterator[dict[str, Any]]:
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system or []
    texts = _read_texts(blocks, "system")
    if kept := [text for text in texts if text and not text.startswith(BILLING_HEADER)]:
        yield {"role": "system", "content": "\n\n".join(kept)}


def _read_texts(blocks: Any, where: str) -> list[str]:
    if not isinstance(blocks, list) or not all(isinstance(each, Mapping) and each.get("type") == "text" for each in blocks):
        raise BadRequest(f"{where} must be a text or a list of text blocks", where)
    return [str(each.get("text", "")) for each in blocks]


def _read_message(message: Any, where: str) -> Iterator[dict[str, Any]]:
    """Yield the messages of one message: each result of a tool is a separate one."""
    role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"{where} must have a role, user or assistant, and a content", where)
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise BadRequest(f"{where}.content must be a text or a list of content blocks", where)
    if role == "assistant":
        yield _read_reply(blocks, where)
    elif role == "system":
        yield {"role": "system", "content": "\n\n".join(_read_texts(blocks, f"{where}.content"))}
    else:
        yield from _read_user(blocks, where)


def _read_user(blocks: Sequence[Mapping[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        if block.get("type") != "tool_result":
            parts.append(_read_part(block, place))
            continue
        if parts:
            yield {"role": "user", "content": _join(parts)}
            parts = []
        result = block.get("content") or ""
        if isinstance(result, list):
            result = _join([_read_part(each, f"{place}.content") for each in result])
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
    if parts or not blocks:
        yield {"role": "user", "content": _join(parts)}


def _read_part(block: Any, where: str) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "text":
        return {"type": "text", "text": str(block.get("text", ""))}
    source = block.get("source") if kind == "image" else None
    if isinstance(source, Mapping) and source.get("type") == "base64":
        return {"type": "image_url", "image_url": f"data:{source.get('media_type')};base64,{source.get('data')}"}
    if isinstance(source, Mapping) and source.get("type") == "url":
        return {"type": "image_url", "image_url": source.get("url")}
    raise BadRequest(f"{where} is of type {kind!r}; text, images by base64 or URL, and tool_result are known", where)


def _join(parts: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return blocks as the content of a message. Neighbouring texts are separate paragraphs."""
    joined: list[dict[str, Any]] = []
    for part in parts:
        if joined and part["type"] == joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": f"{joined[-1]['text']}\n\n{part['text']}"}
        else:
            joined.append(part)
    return joined[0]["text"] if len(joined) == 1 and joined[0]["type"] == "text" else joined


def _read_reply(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    text, thoughts, calls = "", list[str](), list[dict[str, Any]]()
    for number, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "text":
            text += str(block.get("text", ""))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise BadRequest(
                f"{where}.content[{number}] is of type {kind!r}; text, thinking, redacted_thinking and tool_use are known", where
            )
    return {"role": "assistant", "content": text, "reasoning_content": "".join(thoughts), "tool_calls": calls}


def _read_tool(tool: Any, index: int) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom") or not isinstance(tool.get("name"), str):
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise BadRequest(
            f"tools[{index}] is of type {kind!r}; the policy has only the tools that the agent defines itself", "tools"
        )
    schema = tool.get("input_schema") or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": tool["name"], "description": str(tool.get("description") or ""), "parameters": schema},
    }


def _read_choice(choice: Any, chat: dict[str, Any]) -> None:
    if choice is None:
        return
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in CHOICES:
        chat["tool_choice"] = CHOICES[kind]
    else:
        raise BadRequest(f"tool_choice is {choice!r:.80}; its type must be auto, any, tool or none", "tool_choice")
    chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)


class MessageAnswer:
    """Formats the answer to one request."""

    def __init__(self, *, model: str, prompt_tokens: int, stop: Sequence[str]) -> None:
        self.prompt_tokens, self.stop = prompt_tokens, stop
        self.head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}

    def format_whole(self, completion: Completion, reply: ParsedReply) -> dict[str, Any]:
        usage = self._count(len(completion.tokens))
        return {**self.head, "content": list(_list_blocks(reply)), **self._ending(completion, reply), "usage": usage}

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield the events before sampling starts."""
        empty: dict[str, Any] = {**self.head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": self._count(0)}
        yield {"type": "message_start", "message": empty}

    def finish(self, completion: Completion, reply: ParsedReply) -> Iterator[dict[str, Any]]:
        """Yield the events of a finished completion."""
        for index, block in enumerate(_list_blocks(reply)):
            empty: dict[str, Any] = {
                name: {} if name == "input" else "" for name in ("text", "thinking", "signature", "input") if name in block
            }
            yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
            for delta in _list_deltas(block):
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        usage = self._count(len(completion.tokens))
        yield {"type": "message_delta", "delta": self._ending(completion, reply), "usage": usage}
        yield {"type": "message_stop"}

    def _ending(self, completion: Completion, reply: ParsedReply) -> dict[str, Any]:
        cut = cut_at_stop(completion.text, self.stop)
        found = next((stop for stop in self.stop if completion.text.startswith(stop, len(cut))), None)
        if reply.calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if found is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": found}
        return {"stop_reason": "end_turn" if completion.stopped else "max_tokens", "stop_sequence": None}

    def _count(self, sampled: int) -> dict[str, int]:
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return {"input_tokens": self.prompt_tokens, **cached, "output_tokens": sampled}


def _list_blocks(reply: ParsedReply) -> Iterator[dict[str, Any]]:
    if reply.reasoning:
        signature = b64encode(blake2b(reply.reasoning.encode("utf-8", "surrogatepass"), digest_size=24).digest()).decode()
        yield {"type": "thinking", "thinking": reply.reasoning, "signature": signature}
    if reply.content or not (reply.calls or reply.reasoning):
        yield {"type": "text", "text": reply.content}
    yield from map(_format_call, reply.calls)


def _format_call(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}


def _list_deltas(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if block["type"] == "text":
        yield {"type": "text_delta", "text": block["text"]}
    elif block["type"] == "thinking":
        yield {"type": "thinking_delta", "thinking": block["thinking"]}
        yield {"type": "signature_delta", "signature": block["signature"]}
    else:
        yield {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}


def format_message_error(error: Exception, status: int = 500) -> dict[str, Any]:
    """Return an error in the format of Anthropic's API. Internal errors are logged, but not sent to the client."""
    message = format_error(error)["error"]["message"]
    if getattr(error, "code", None) == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # as clients recognize it, to shorten their history
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}
