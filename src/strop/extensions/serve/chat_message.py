"""Converts messages and tools between OpenAI's API and the form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from strop.safety.site_guard import BadRequest
from strop.sampling import is_encodable
from strop.tools.base import ParsedReply
from strop.types import Image, Message, ToolCall

# Roles unknown to chat templates, and their replacements.
ROLES = {"developer": "system", "function": "tool"}
TEXTS, IMAGES = ("text", "input_text", "output_text"), ("image_url", "input_image")  # types of parts


def read_messages(found: Any) -> tuple[Message, ...]:
    """Read the messages of a chat completion. Raises BadRequest."""
    if not isinstance(found, list) or not found:
        raise BadRequest("messages must be a list of at least one message", "messages")
    return tuple(_read_message(message, f"messages[{index}]") for index, message in enumerate(found))


def _read_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequest(f"{where} must have a role and a content", where)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise BadRequest(f"{where}.tool_calls must be a list of calls", where)
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    role, given = str(message["role"]), message.get("content")
    content, images = ("", ()) if given is None and calls else read_parts(given, where)
    return Message(
        ROLES.get(role, role),
        content,
        images=images,
        tool_calls=tuple(_read_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)),
        reasoning=reasoning if isinstance(reasoning, str) else "",
        name=str(message.get("name") or ""),
        tool_call_id=str(message.get("tool_call_id") or ""),
    )


def read_content(content: Any, where: str) -> str:
    """Read a text, or a list of parts that are texts. Raises BadRequest."""
    text, images = read_parts(content, where)
    if images:
        raise BadRequest(f"{where}.content has an image, which is possible only in a message of the user or of a tool", where)
    return text


def read_parts(content: Any, where: str) -> tuple[str, tuple[Image, ...]]:
    """Read a text, or a list of parts that are texts and images. Raises BadRequest."""
    text, images = content, list[Image]()
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        text = ""
        for part in content:
            if part.get("type") in TEXTS:
                text += str(part.get("text", ""))
            elif part.get("type") in IMAGES:
                images.append(Image(_read_image(part, where), len(text)))
            else:
                text = None
                break
    if not isinstance(text, str):
        raise BadRequest(f"{where}.content must be a text or a list of texts and images", where)
    if not is_encodable(text):
        raise BadRequest(f"{where}.content has a lone surrogate, which is not text", where)
    return text, tuple(images)


def _read_image(part: Mapping[str, Any], where: str) -> str:
    """Return the URL of an image. A path would let an agent read this machine's files."""
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url.startswith(("data:", "http://", "https://")) or not is_encodable(url):
        raise BadRequest(f"{where}.content has an image without a URL: send it as data:image/png;base64,...", where)
    return url


def _read_call(call: Any, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where} must have a function with a name and arguments", where)
    return ToolCall(function["name"], read_arguments(function.get("arguments"), where), str(call.get("id") or ""))


def read_arguments(arguments: Any, where: str) -> Mapping[str, Any]:
    """Read the arguments of a call, an object or its JSON. Raises BadRequest."""
    try:
        read = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{where}: the arguments are not valid JSON: {error}", where) from error
    if not isinstance(read, Mapping):
        raise BadRequest(f"{where}: the arguments must be a JSON object; found {type(read).__name__}", where)
    return read


def read_tools(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Read the tools available to the policy; none with ``tool_choice: none``. Raises BadRequest."""
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise BadRequest("tools must be a list of functions, each with type: function and a function with a name", "tools")
    return () if body.get("tool_choice") == "none" else tuple(tools)


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def format_reply(reply: ParsedReply) -> dict[str, Any]:
    """Return the message of a chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if reply.calls else "")}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = format_calls(reply.calls)
    return message


def format_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dump_arguments(call)}} for call in calls
    ]


def dump_arguments(call: ToolCall) -> str:
    return json.dumps(dict(call.arguments), ensure_ascii=False)
