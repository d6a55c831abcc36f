"""``<tool_call><name>NAME</name><arguments><KEY>VALUE</KEY></arguments></tool_call>``: plain XML, independent of model families."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from strop.tools.base import ParsedReply, ToolSchema
from strop.tools.formats.tagged_calls import CLOSE, OPEN, RESULT, parse_tagged_calls, read_xml_call

_CALL = re.compile(r"\s*<name>([^<]*)</name>\s*(?:<arguments>(.*)</arguments>|<arguments\s*/>)?\s*\Z", re.DOTALL)
_ARGUMENT = re.compile(r"\s*<([A-Za-z_][\w.-]*)>(.*?)</\1>", re.DOTALL)
_SHAPES = ("<name>NAME</name> and <arguments> ... </arguments>", "<ARGUMENT>VALUE</ARGUMENT>")


@dataclass(frozen=True)
class XmlFormat:
    name: str = "xml"
    stop_strings: Sequence[str] = (CLOSE,)
    inline_result: str | None = RESULT

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedReply:
        return parse_tagged_calls(text, lambda rest: read_xml_call(rest, _CALL, _ARGUMENT, _SHAPES, tools))

    def example(self, name: str) -> str:
        return f"{OPEN}\n<name>{name}</name>\n<arguments>\n<ARGUMENT>VALUE</ARGUMENT>\n</arguments>\n{CLOSE}"
