"""Calls between ``<tool_call>`` and ``</tool_call>``, with any content."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from strop.thoughts import split_thoughts
from strop.tools.base import ParsedReply, ToolSchema
from strop.tools.formats.reading import MalformedCall, named_call, read_argument
from strop.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
RESULT = "\n<tool_response>\n{result}\n</tool_response>\n"

ReadCall = Callable[
    [str], tuple[ToolCall, int]
]  # the text after OPEN -> its call, and the position after CLOSE; or MalformedCall


def parse_tagged_calls(
    text: str, read: ReadCall, *, stray: Sequence[str] = (CLOSE,), says: str = f"{CLOSE} closes no {OPEN}."
) -> ParsedReply:
    """Parse a turn. Text outside of a call that contains one of ``stray`` is malformed, with the message ``says``."""
    reasoning, rest = split_thoughts(text, call=(OPEN, CLOSE))
    content: list[str] = []
    calls: list[ToolCall] = []
    malformed: list[str] = []
    while True:
        before, opened, rest = rest.partition(OPEN)
        content.append(before)
        if any(mark in before for mark in stray):
            malformed.append(says)
        if not opened:
            return ParsedReply("".join(content).strip(), reasoning, tuple(calls), tuple(malformed))
        try:
            call, end = read(rest)
            calls.append(call)
        except MalformedCall as error:
            malformed.append(f"A call between {OPEN} and {CLOSE} could not be read: {error}.")
            close = rest.find(CLOSE)
            end = len(rest) if close < 0 else close + len(CLOSE)
        rest = rest[end:]


def read_xml_call(
    text: str, call: re.Pattern[str], argument: re.Pattern[str], shapes: tuple[str, str], tools: Sequence[ToolSchema]
) -> tuple[ToolCall, int]:
    """Parse a call whose first group is its name and second its arguments, each a key and a value. ``shapes``: both, in words for
    errors.
    """
    body, closed, _ = text.partition(CLOSE)
    if not closed:
        raise MalformedCall(f"it is not closed by {CLOSE}")
    if (found := call.match(body)) is None:
        raise MalformedCall(f"it is not {shapes[0]}")
    name, inside = found[1].strip(), found[2] or ""
    arguments: dict[str, Any] = {}
    position = 0
    while (each := argument.match(inside, position)) is not None:
        key, value = each[1], each[2]
        if key in arguments:
            raise MalformedCall(f"the argument {key} of {name} is given twice")
        arguments[key] = read_argument(key, unwrap_lines(value), name, tools)
        position = each.end()
    if left := inside[position:].strip():
        raise MalformedCall(f"{left!r:.60} is not {shapes[1]}")
    return named_call(name, arguments), len(body) + len(CLOSE)


def unwrap_lines(value: str) -> str:
    """Remove the line breaks after the opening tag and before the closing tag, which are not part of a value."""
    return value.removeprefix("\n").removesuffix("\n")
