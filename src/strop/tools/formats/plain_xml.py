"""``<tool_call><name>NAME</name><arguments><KEY>VALUE</KEY></arguments></tool_call>``: XML without anything of a family's own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strop.tools.base import ParsedReply, ToolSchema
from strop.tools.formats.qwen_xml import CLOSE, OPEN, unwrap_lines
from strop.tools.formats.reading import MalformedCall, named_call, read_argument, split_reasoning
from strop.types import ToolCall

_CALL = re.compile(r"\s*<name>([^<]*)</name>\s*(?:<arguments>(.*)</arguments>|<arguments\s*/>)?\s*\Z", re.DOTALL)
_ARGUMENT = re.compile(r"\s*<([A-Za-z_][\w.-]*)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class XmlFormat:
    name: str = "xml"
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
            if CLOSE in before:
                malformed.append(f"{CLOSE} closes no {OPEN}.")
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
        return f"{OPEN}\n<name>{name}</name>\n<arguments>\n<ARGUMENT>VALUE</ARGUMENT>\n</arguments>\n{CLOSE}"


def _read(body: str, tools: Sequence[ToolSchema]) -> ToolCall:
    if (call := _CALL.match(body)) is None:
        raise MalformedCall("it is not <name>NAME</name> and <arguments> ... </arguments>")
    name, inside = call[1].strip(), call[2] or ""
    arguments: dict[str, Any] = {}
    position = 0
    while (argument := _ARGUMENT.match(inside, position)) is not None:
        key, value = argument[1], argument[2]
        if key in arguments:
            raise MalformedCall(f"the argument {key} of {name} is given twice")
        arguments[key] = read_argument(key, unwrap_lines(value), name, tools)
        position = argument.end()
    if left := inside[position:].strip():
        raise MalformedCall(f"{left!r:.60} is not <ARGUMENT>VALUE</ARGUMENT>")
    return named_call(name, arguments)
