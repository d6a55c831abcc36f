"""Parse columns with conversations into messages.

Two formats are read: {role, content} of chat templates, and ShareGPT's {from, value}. A record with content that ``Message`` cannot
represent is an error; nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strop.data.prompt_template import PromptTemplate
from strop.data.sources.records import DataError, Record, check_text, get_text, get_value
from strop.types import Message, Messages, assistant, system

# Role names in datasets -> roles of chat templates.
ROLES: Mapping[str, str] = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool", "function", "ipython")},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
# Unsupported fields beside role and content, and where to put their text instead.
UNSUPPORTED_FIELDS = {
    "tool_calls": "write the call into content, as the model writes it",
    "function_call": "write the call into content, as the model writes it",
    "reasoning_content": "write the reasoning into content, between the model's own markers",
    "reasoning": "write the reasoning into content, between the model's own markers",
    "thinking": "write the reasoning into content, between the model's own markers",
}


def get_text_or_messages(record: Record, key: str, option: str, where: str) -> str | tuple[Message, ...]:
    """Return the text or the messages of a column. Raises DataError for other values."""
    value = get_value(record, key, option, where)
    if isinstance(value, list | tuple):
        return parse_messages(value, f"{where}: {key!r}")
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        return get_text(record, key, option, where)
    raise DataError(
        f"{where}: {key!r} is {value!r:.80}, neither text nor a list of messages. Set {option} to a key that holds one of them, "
        "or fix the record"
    )


def get_prompt_text(record: Record, key: str, option: str, where: str) -> str:
    """Return the text of a prompt column, of messages that of all, by which equal prompts are recognized."""
    value = get_text_or_messages(record, key, option, where)
    return value if isinstance(value, str) else join_text(value)


def join_text(messages: Messages) -> str:
    """Return roles and contents in one text, which is equal only for equal messages."""
    return "\0".join(text for message in messages for text in (message.role, message.content))


def parse_messages(value: Any, where: str) -> tuple[Message, ...]:
    """Parse a list of messages in either format. ``where`` names the record and column in errors. Raises DataError."""
    if not isinstance(value, list | tuple):
        raise DataError(f"{where} is {value!r:.80}, not a list of messages, each an object with role and content")
    if not value:
        raise DataError(f"{where} is an empty list; a conversation needs at least one message")
    return tuple(_parse_message(item, f"{where}, message {number}") for number, item in enumerate(value, start=1))


def _parse_message(item: Any, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f"{where} is {item!r:.80}, not an object with role and content")
    for role, content in (("role", "content"), ("from", "value")):
        if role in item and content in item:
            _reject_unsupported_fields(item, where)
            return Message(_parse_role(item[role], where), _parse_content(item[content], where))
    raise DataError(f"{where} has the keys {sorted(item)}; a message needs role and content, or from and value")


def _parse_role(name: Any, where: str) -> str:
    if not isinstance(name, str) or name not in ROLES:
        raise DataError(f"{where} has the unknown role {name!r}; write one of {', '.join(ROLES)}")
    return ROLES[name]


def _parse_content(value: Any, where: str) -> str:
    """Return text, or the concatenated parts of a list of text parts. Raises DataError."""
    if isinstance(value, str):
        return check_text(value, "content", where)
    parts = value if isinstance(value, list | tuple) else [value]
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None for part in parts]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{where} holds {value!r:.80}, which is not text; only text conversations can be trained on")
    return check_text("".join(text for text in texts if text is not None), "content", where)


def _reject_unsupported_fields(item: Mapping[str, Any], where: str) -> None:
    for key, instead in UNSUPPORTED_FIELDS.items():
        if item.get(key):
            raise DataError(f"{where} has {key!r}, which would be lost: only role and content are read; {instead}")
    if item.get("weight", 1) == 0:
        raise DataError(f"{where} has weight 0, but every assistant message is trained on; end the conversation before it")


def make_prompt(value: str | tuple[Message, ...], template: PromptTemplate, where: str) -> tuple[Message, ...]:
    """Return the prompt: a question in the template, or messages with the template's system prompt unless they have their own.

    Raises DataError for an empty question, and for messages if a prompt file is set, which applies only to questions.
    """
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where} is empty; a prompt needs a question")
        return template.render(value)
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
    """Return the messages up to the last assistant message; empty if there is none. Nothing after it is trained on."""
    last = max((index for index, message in enumerate(messages) if message.role == "assistant"), default=-1)
    return tuple(messages[: last + 1])


def first_reply_index(messages: Messages) -> int:
    """Return the index of the first reply, or the number of messages if there is none. A conversation's first message is not a reply."""
    return next((index for index, message in enumerate(messages) if index and message.role == "assistant"), len(messages))


def last_message_text(messages: Sequence[Message], role: str) -> str:
    """Return the content of the last message by ``role``, or ""."""
    return next((message.content for message in reversed(messages) if message.role == role), "")
