"""``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: Qwen3-Coder, Nemotron 3."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strop.tools.base import ParsedReply, ToolSchema
from strop.tools.formats.reading import MalformedCall, named_call, read_argument, split_reasoning
from strop.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)


@dataclass(frozen=True)
class QwenXmlFormat:
    name: str = "qwen_xml"
    stop_strings: Sequence[str] = (CLOSE,)
    inline_result: str | None = "\n<tool_response>\n{result}\n</tool_response>\n"

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedReply:
        reasoning, rest = split_reasoning(text)
        content: list[str] = []
        calls: list[ToolCall] = []
        malformed: list[str] = []
        while True:
            before, opened, rest = rest.partition(OPEN)
            content.append(before)
            if CLOSE in before or "<function=" in before:
                malformed.append(f"A call begins with {OPEN} and ends with {CLOSE}; one of them is missing.")
            if not opened:
                break
            body, closed, after = rest.partition(CLOSE)
            try:
                if not closed:
                    raise MalformedCall(f"it is not closed by {CLOSE}")
                calls.append(_read(body, tools))
            except MalformedCall as error:
                malformed.append(f"A call between {OPEN} and {CLOSE} could not be read: {error}.")
            rest = after
        return ParsedReply("".join(content).strip(), reasoning, tuple(calls), tuple(malformed))

    def example(self, name: str) -> str:
        return f"{OPEN}\n<function={name}>\n<parameter=ARGUMENT>\nVALUE\n</parameter>\n</function>\n{CLOSE}"


def _read(body: str, tools: Sequence[ToolSchema]) -> ToolCall:
    if (function := _FUNCTION.match(body)) is None:
        raise MalformedCall("it is not <function=NAME> ... </function>")
    name, inside = function[1], function[2]
    arguments: dict[str, Any] = {}
    position = 0
    while (parameter := _PARAMETER.match(inside, position)) is not None:
        key, value = parameter[1], parameter[2]
        if key in arguments:
            raise MalformedCall(f"the argument {key} of {name} is given twice")
        arguments[key] = read_argument(key, unwrap_lines(value), name, tools)
        position = parameter.end()
    if left := inside[position:].strip():
        raise MalformedCall(f"{left!r:.60} is not <parameter=NAME> ... </parameter>")
    return named_call(name, arguments)


def unwrap_lines(value: str) -> str:
    """Take away the line break after the opening tag and the one before the closing tag, which are not part of a value."""
    return value.removeprefix("\n").removesuffix("\n")
