"""OpenAI's Responses API on top of chat completions: input items to messages, replies to output items, and stream events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from strop.extensions.serve.chat_message import dump_arguments, format_reply, read_content, read_parts
from strop.extensions.serve.http_api import format_error
from strop.generation.base import Completion
from strop.safety.site_guard import BadRequest
from strop.tools.base import ParsedReply

Conversations = dict[str, list[dict[str, Any]]]  # response id -> the messages up to its reply
SAME_NAME = (
    "model",
    "temperature",
    "top_p",
    "tool_choice",
    "parallel_tool_calls",
    "stream",
    "seed",
    "min_p",
    "top_k",
    "stop",
    "chat_template_kwargs",
)


def make_chat_body(body: Any, conversations: Conversations) -> dict[str, Any]:
    """Return the equivalent body of a chat completion request. Raises BadRequest."""
    if not isinstance(body, Mapping):
        raise BadRequest("the request must be a JSON object")
    for name, neutral in (("background", (None, False)), ("prompt", (None,)), ("conversation", (None,))):
        if body.get(name) not in neutral:
            raise BadRequest(f"{name} is not supported", name)
    form = (body.get("text") or {}).get("format") if isinstance(body.get("text"), Mapping) else None
    instructions, tools = body.get("instructions"), body.get("tools") or []
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list of functions", "tools")
    begin = [{"role": "system", "content": instructions}] if instructions else []
    chat = {name: body[name] for name in SAME_NAME if body.get(name) is not None}
    chat["messages"] = [*begin, *_continue(body, conversations), *read_items(body.get("input"))]
    chat["tools"] = [_read_tool(tool, where) for where, _, tool in _list_tools(tools)]
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if form not in (None, {"type": "text"}):
        chat["response_format"] = form
    if isinstance(choice := body.get("tool_choice"), Mapping):
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    return chat


def _continue(body: Mapping[str, Any], conversations: Conversations) -> Sequence[dict[str, Any]]:
    earlier = body.get("previous_response_id")
    if earlier is None:
        return ()
    if not isinstance(earlier, str) or earlier not in conversations:
        raise BadRequest(
            f"the response {earlier!r} does not exist in this episode",
            "previous_response_id",
            code="previous_response_not_found",
        )
    return conversations[earlier]


def read_items(items: Any) -> list[dict[str, Any]]:
    """Return input items as chat messages. Consecutive assistant items become one message. Raises BadRequest."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise BadRequest("input must be a text or a list of items", "input")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        if item.get("role") == "assistant":
            reply = _open_reply(messages)
            reply["content"] = (reply["content"] or "") + read_content(item.get("content"), where)
        else:
            read_parts(item.get("content"), where)
            messages.append({"role": item.get("role"), "content": item["content"]})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            raise BadRequest(f"{where}.content must be a list of texts", where)
        _open_reply(messages)["reasoning_content"] = "\n".join(str(part.get("text", "")) for part in parts)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        calls = _open_reply(messages).setdefault("tool_calls", [])
        calls.append({"id": item.get("call_id") or item.get("id"), "type": "function", "function": function})
    elif kind == "function_call_output":
        output = item.get("output")
        read_parts(output, where)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    else:
        raise BadRequest(
            f"{where} is of type {kind!r}; message, reasoning, function_call and function_call_output are known", where
        )


def _open_reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant message that an item belongs to."""
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant", "content": None})
    if messages[-1]["content"] is None and "tool_calls" not in messages[-1]:
        messages[-1]["content"] = ""
    return messages[-1]


def _list_tools(tools: Sequence[Any]) -> Iterator[tuple[str, str | None, Any]]:
    """Yield (place, namespace, tool). A namespace holds functions."""
    for index, tool in enumerate(tools):
        inner = tool.get("tools") if isinstance(tool, Mapping) and tool.get("type") == "namespace" else None
        if isinstance(inner, list):
            yield from ((f"tools[{index}].tools[{number}]", str(tool.get("name")), each) for number, each in enumerate(inner))
        else:
            yield f"tools[{index}]", None, tool


def _read_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise BadRequest(f"{where} is of type {kind!r}; only functions can be called", "tools")
    return {"type": "function", "function": {name: tool[name] for name in ("name", "description", "parameters") if name in tool}}


class ResponseAnswer:
    """Formats the answer to one request of the Responses API."""

    def __init__(self, body: Mapping[str, Any], chat: Mapping[str, Any], *, model: str, prompt_tokens: int) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self.chat, self.prompt_tokens = chat, prompt_tokens
        listed = _list_tools(body.get("tools") or [])
        self.namespaces = {tool["name"]: {"namespace": name} for _, name, tool in listed if name is not None}
        self.head = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.get("instructions"),
            "previous_response_id": body.get("previous_response_id"),
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools") or [],
            "temperature": body.get("temperature"),
            "top_p": body.get("top_p"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "error": None,
            "incomplete_details": None,
        }

    def keep(self, reply: ParsedReply, conversations: Conversations) -> None:
        """Store the conversation, for a request that refers to this response as the previous one."""
        messages = [message for message in self.chat["messages"] if message["role"] != "system" or not self.head["instructions"]]
        conversations[self.id] = [*messages, format_reply(reply)]

    def format_whole(self, completion: Completion, reply: ParsedReply) -> dict[str, Any]:
        return self._format(completion, list(self._items(reply, "completed" if completion.stopped else "incomplete")))

    def _format(self, completion: Completion, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        sampled = len(completion.tokens)
        usage = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + sampled,
        }
        ended = {"status": "completed"} if completion.stopped else {"status": "incomplete", "incomplete_details": MAX_TOKENS}
        return {**self.head, **ended, "output": items, "usage": usage}

    def _items(self, reply: ParsedReply, status: str) -> Iterator[dict[str, Any]]:
        tail = self.id.removeprefix("resp_")
        if reply.reasoning:
            parts = [{"type": "reasoning_text", "text": reply.reasoning}]
            yield {"type": "reasoning", "id": f"rs_{tail}", "summary": [], "content": parts, "status": status}
        if reply.content or not reply.calls:
            text = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
            yield {"type": "message", "id": f"msg_{tail}", "role": "assistant", "status": status, "content": [text]}
        for index, call in enumerate(reply.calls):
            named = {
                "call_id": call.id,
                "name": call.name,
                **self.namespaces.get(call.name, {}),
                "arguments": dump_arguments(call),
            }
            yield {"type": "function_call", "id": f"fc_{tail}_{index}", "status": status, **named}

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield the events before sampling starts."""
        empty = {**self.head, "status": "in_progress", "output": [], "usage": None}
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": empty}

    def finish(self, completion: Completion, reply: ParsedReply) -> Iterator[dict[str, Any]]:
        """Yield the events of a finished completion."""
        items = list(self._items(reply, "completed" if completion.stopped else "incomplete"))
        for index, item in enumerate(items):
            place = {"output_index": index, "item_id": item["id"]}
            opened = {**item, "status": "in_progress", **({"arguments": ""} if "arguments" in item else {})}
            yield {
                "type": "response.output_item.added",
                "output_index": index,
                "item": {**opened, **({"content": []} if "content" in item else {})},
            }
            yield from _item_events(item, place)
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        kind = "response.completed" if completion.stopped else "response.incomplete"
        yield {"type": kind, "response": self._format(completion, items)}


MAX_TOKENS = {"reason": "max_output_tokens"}


def _item_events(item: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if item["type"] == "function_call":
        yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
        yield {
            "type": "response.function_call_arguments.done", **place, "name": item["name"], "arguments": item["arguments"]
        }  # fmt: skip
        return
    for number, part in enumerate(item["content"]):
        where, kind = {**place, "content_index": number}, f"response.{part['type']}"
        more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        yield {"type": "response.content_part.added", **where, "part": {**part, "text": ""}}
        yield {"type": f"{kind}.delta", **where, "delta": part["text"], **more}
        yield {"type": f"{kind}.done", **where, "text": part["text"], **more}
        yield {"type": "response.content_part.done", **where, "part": part}


def format_response_error(error: Exception) -> dict[str, Any]:
    """Return the event of an error after a stream has begun."""
    return {"type": "error", "param": None, "code": None, "message": format_error(error)["error"]["message"]}
