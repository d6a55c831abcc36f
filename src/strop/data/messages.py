"""Parse columns with conversations into messages.

Two formats are read: {role, content} as in chat templates and OpenAI's API, with tool_calls, tool_call_id, name, reasoning and
weight, and ShareGPT's {from, value}. Content parts are texts and images (``strop.data.sources.image_columns``). A record with content
that ``Message`` cannot represent is an error; nothing is dropped silently.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from strop.data.prompt_template import PromptTemplate
from strop.data.sources.image_columns import IMAGE_PARTS, IMAGES, REFERENCE_KEYS, RecordImages, read_reference, render_question
from strop.data.sources.records import DataError, Record, check_text, get_text, get_value
from strop.types import Image, Message, Messages, ToolCall, assistant, system

# Role names in datasets -> roles of chat templates.
ROLES: Mapping[str, str] = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool", "function", "ipython")},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
_LISTED = re.compile(r"\s*\[\s*\{\s*[\"']")  # start of a list of objects written as text
TOOL_ROLES = ("tool", "function", "ipython")
CALL_ROLE = "function_call"  # ShareGPT's role for a message that is a call
TEXT_TYPES = ("text", "input_text", "output_text")
MEDIA_PARTS = (
    "audio",
    "input_audio",
    "audio_url",
    "video",
    "video_url",
    "input_video",
)  # content types that no supported model reads
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def get_text_or_messages(record: Record, key: str, option: str, where: str) -> str | tuple[Message, ...]:
    """Return the text or the messages of a column. Raises DataError for other values."""
    value = decode_messages(get_value(record, key, option, where))
    if isinstance(value, list | tuple):
        return parse_messages(value, f"{where}: {key!r}", record.get(IMAGES))
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        return get_text(record, key, option, where)
    raise DataError(
        f"{where}: {key!r} is {value!r:.80}, neither text nor a list of messages. Set {option} to a key that holds one of them, "
        "or fix the record"
    )


def decode_messages(value: Any) -> Any:
    """Return the list of messages that a text holds as JSON or Python, as in CSV and Parquet exports; any other value unchanged."""
    if not isinstance(value, str) or not _LISTED.match(value):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, list) and all(isinstance(each, dict) and {"role", "from"} & each.keys() for each in found):
            return found
    return value


def get_prompt_text(record: Record, key: str, option: str, where: str) -> str:
    """Return the text of a prompt column (for messages: of all of them), with its images. It identifies equal prompts."""
    value = get_text_or_messages(record, key, option, where)
    return "\0".join((value, *record.get(IMAGES, ()))) if isinstance(value, str) else join_text(value)


def join_text(messages: Messages) -> str:
    """Return roles and contents as one text that is equal only for equal messages."""
    return "\0".join(text for message in messages for text in (message.role, message.content, *_other_texts(message)))


def _other_texts(message: Message) -> tuple[str, ...]:
    fields = {key: value for key, value in message.as_dict().items() if key != "role" and (key != "content" or message.images)}
    return (json.dumps(fields, sort_keys=True),) if fields else ()


def parse_messages(value: Any, where: str, images: Any = None) -> tuple[Message, ...]:
    """Parse a list of messages in either format. ``where`` names the record and column in errors. Raises DataError.

    ``images``: the record's images, for messages with placeholders only: ``{type: image}``, or ``<image>`` in a text. Without
    placeholders they go before the text of the user's first message.
    """
    value = decode_messages(value)
    if not isinstance(value, list | tuple):
        raise DataError(f"{where} is {value!r:.80}, not a list of messages, each an object with role and content")
    if not value:
        raise DataError(f"{where} is an empty list; a conversation needs at least one message")
    unplaced = RecordImages(images if isinstance(images, list | tuple) else (), where)
    messages = tuple(_parse_message(item, f"{where}, message {number}", unplaced) for number, item in enumerate(value, start=1))
    if not any(message.images for message in messages):
        return unplaced.place_first(messages)
    if unplaced.left:
        raise DataError(f"{where} has places for all but {unplaced.left} of the images of the record; fix the record")
    return messages


def _parse_message(item: Any, where: str, unplaced: RecordImages) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f"{where} is {item!r:.80}, not an object with role and content")
    calls = _parse_calls(item, where)
    reasoning = next((_parse_field(item, key, where) for key in REASONING_FIELDS if item.get(key)), "")
    for role, content in (("role", "content"), ("from", "value")):
        if role in item and (content in item or calls):
            text = item.get(content)
            images: tuple[Image, ...] = ()
            if item[role] == CALL_ROLE and not calls:
                calls = _parse_written_call(text)
                text = None if calls else text
            if item[role] in (*TOOL_ROLES, "observation"):
                text = _write_result(text)
            if text is not None or not (calls or reasoning):
                text, images = _parse_content(text, where, unplaced)
            return Message(
                _parse_role(item[role], where),
                text or "",
                tool_calls=calls,
                reasoning=reasoning,
                name=_parse_field(item, "name", where),
                tool_call_id=_parse_field(item, "tool_call_id", where),
                images=images,
                in_loss=_parse_weight(item, where),
            )
    raise DataError(f"{where} has the keys {sorted(item)}; a message needs role and content, or from and value")


def _parse_weight(item: Mapping[str, Any], where: str) -> bool:
    """Return whether a message is trained on: its ``weight``, by default 1, as in OpenAI's format."""
    weight = item.get("weight")
    if weight is None or (isinstance(weight, int | float) and weight in (0, 1)):
        return weight != 0
    raise DataError(f"{where} has the weight {weight!r:.80}; a message is trained on (1) or not (0)")


def _write_result(value: Any) -> Any:
    """Return a tool result as text: objects and lists that are not content parts become JSON, as templates write it."""
    parts = isinstance(value, list | tuple) and all(isinstance(part, str) or _is_part(part) for part in value)
    structured = isinstance(value, Mapping | list | tuple) and not (parts and value) and not _is_part(value)
    return json.dumps(value, ensure_ascii=False) if structured else value


def _is_part(value: Any) -> bool:
    return isinstance(value, Mapping) and ("type" in value or set(value) == {"text"})


def _parse_written_call(text: Any) -> tuple[ToolCall, ...]:
    """Parse a text that is a JSON call with name and arguments; in any other form it stays a text, and nothing is returned."""
    try:
        call = json.loads(text) if isinstance(text, str) else None
        return (_parse_call(call, ""),)
    except (ValueError, RecursionError):  # not JSON, or not a call
        return ()


def _parse_role(name: Any, where: str) -> str:
    if not isinstance(name, str) or name not in ROLES:
        raise DataError(f"{where} has the unknown role {name!r}; write one of {', '.join(ROLES)}")
    return ROLES[name]


def _parse_content(value: Any, where: str, unplaced: RecordImages) -> tuple[str, tuple[Image, ...]]:
    """Return a text, or the joined texts of a list of parts, and the images in it. Raises DataError."""
    if isinstance(value, str):
        return unplaced.place(check_text(value, "content", where), where)
    text, images, has_parts = "", [], False
    for part in value if isinstance(value, list | tuple) and value else [value]:
        content: Mapping[str, Any] = part if isinstance(part, Mapping) else {"type": None}
        kind = content.get("type", "text")
        if kind in IMAGE_PARTS:
            images.append(Image(_parse_image(content, where, unplaced), position=len(text)))
            has_parts = True
        elif kind in TEXT_TYPES and isinstance(content.get("text"), str):
            text += content["text"]
        elif kind in MEDIA_PARTS:
            raise DataError(
                f"{where} has a part of the type {kind!r}: audio and video cannot be trained on in this version, only text and images. "
                "Leave the record out"
            )
        else:
            raise DataError(f"{where} holds {value!r:.80}, which is not text; only text and images can be trained on")
    text = check_text(text, "content", where)
    return (text, tuple(images)) if has_parts else unplaced.place(text, where)


def _parse_image(part: Mapping[str, Any], where: str, unplaced: RecordImages) -> str:
    """Return the reference of an image: the part's own, otherwise the record's next one. Raises DataError."""
    found = next((part[key] for key in (*REFERENCE_KEYS, "bytes") if part.get(key) is not None), None)
    reference = unplaced.take() if found is None else read_reference(found, where)
    if reference is not None:
        return reference
    raise DataError(
        f"{where} has the image {part!r:.80} without a reference; write its path or address into the part, as image or image_url, or into "
        f"the column {IMAGES!r} of the record"
    )


def _parse_field(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} is {value!r:.80}, which is not text; fix the record")
    return check_text(value, key, where)


def _parse_calls(item: Mapping[str, Any], where: str) -> tuple[ToolCall, ...]:
    """Return the tool calls of a message: OpenAI's tool_calls, its older function_call, or plain calls with name and arguments."""
    calls = item.get("tool_calls") or ([item["function_call"]] if item.get("function_call") else [])
    if not isinstance(calls, list | tuple):
        raise DataError(f"{where}: 'tool_calls' is {calls!r:.80}, not a list of calls; fix the record")
    return tuple(_parse_call(call, where) for call in calls)


def _parse_call(call: Any, where: str) -> ToolCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where} has the call {call!r:.120}, without a name; write {{function: {{name: ..., arguments: ...}}}}")
    given = function.get("arguments")
    try:
        arguments = json.loads(given) if isinstance(given, str) else {} if given is None else given
    except ValueError:
        arguments = None
    if not isinstance(arguments, Mapping):
        raise DataError(f"{where}: the call of {function['name']} has the arguments {given!r:.120}, which are no JSON object")
    return ToolCall(function["name"], dict(arguments), str(call.get("id") or ""))


def parse_tools(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Parse tool definitions, a list or its JSON, into the form chat templates take. Raises DataError."""
    try:
        listed = json.loads(value) if isinstance(value, str) and value.strip() else value or []
    except ValueError as error:
        raise DataError(f"{where} is {value!r:.80}, which is no JSON: {error}") from error
    if not isinstance(listed, list | tuple):
        raise DataError(f"{where} is {value!r:.80}, not a list of definitions of tools; fix the record")
    return tuple(_parse_tool(tool, where) for tool in listed)


def _parse_tool(tool: Any, where: str) -> Mapping[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{where} has the definition {tool!r:.120}, without a name; write {{type: function, function: {{name: ..., parameters: ...}}}}"
        )
    return tool if "function" in tool else {"type": "function", "function": tool}


def make_prompt(
    value: str | tuple[Message, ...], template: PromptTemplate, where: str, images: Sequence[Any] | None = None
) -> tuple[Message, ...]:
    """Return the prompt: a question in the template, or messages, with the template's system prompt unless they have their own.

    ``images``: the record's images, for a question with ``<image>`` placeholders (without them, images come first); messages hold
    their own.

    Raises DataError for an empty question, and for messages if a prompt file is set, which applies only to questions.
    """
    if isinstance(value, str):
        question, placed = render_question(value, images or (), template.prefix, where)
        if not question.strip() and not placed:
            raise DataError(f"{where} is empty; a prompt needs a question")
        *before, asked = template.render(question)
        return (*before, replace(asked, images=placed))
    if template.prefix or template.suffix:
        raise DataError(
            f"{where} holds messages, but prompt_file applies only to plain questions. Set prompt_file to null for this data"
        )
    if template.system is None or any(message.role in ("system", "developer") for message in value):
        return value
    return (system(template.system), *value)


def make_completion(value: str | tuple[Message, ...], prompt: Messages, where: str) -> tuple[Message, ...]:
    """Return the completion of ``prompt`` up to its last reply. Messages may repeat the prompt first. Raises DataError without a reply."""
    if isinstance(value, str):
        return (assistant(value),)
    repeated = len(prompt) if value[: len(prompt)] == tuple(prompt) else 0
    completion = trim_after_last_reply(value[repeated:])
    if not completion:
        raise DataError(f"{where} has no assistant message; a completion needs one. Fix the record")
    if completion[0].role != "assistant":
        raise DataError(
            f"{where} begins with a message by {completion[0].role!r}; a completion begins with the assistant, or with the whole prompt"
        )
    return completion


def trim_after_last_reply(messages: Messages) -> tuple[Message, ...]:
    """Return the messages up to the last assistant message, as nothing after it is trained on; empty if there is none."""
    last = max((index for index, message in enumerate(messages) if message.role == "assistant"), default=-1)
    return tuple(messages[: last + 1])


def first_reply_index(messages: Messages) -> int:
    """Return the index of the first reply, or the number of messages if there is none. A conversation's first message is not a reply."""
    return next((index for index, message in enumerate(messages) if index and message.role == "assistant"), len(messages))


def last_message_text(messages: Sequence[Message], role: str) -> str:
    """Return the content of the last message by ``role``, or ""."""
    return next((message.content for message in reversed(messages) if message.role == role), "")
