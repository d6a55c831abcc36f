"""``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: Qwen3-Coder, Nemotron 3."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from strop.tools.base import ParsedReply, ToolSchema
from strop.tools.formats.tagged_calls import CLOSE, OPEN, RESULT, parse_tagged_calls, read_xml_call

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
_SHAPES = ("<function=NAME> ... </function>", "<parameter=NAME> ... </parameter>")
_STRAY = (CLOSE, "<function=")


@dataclass(frozen=True)
class QwenXmlFormat:
    name: str = "qwen_xml"
    stop_strings: Sequence[str] = (CLOSE,)
    inline_result: str | None = RESULT

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedReply:
        says = f"A call begins with {OPEN} and ends with {CLOSE}; one of them is missing."
        return parse_tagged_calls(
            text, lambda rest: read_xml_call(rest, _FUNCTION, _PARAMETER, _SHAPES, tools), stray=_STRAY, says=says
        )

    def example(self, name: str) -> str:
        return f"{OPEN}\n<function={name}>\n<parameter=ARGUMENT>\nVALUE\n</parameter>\n</function>\n{CLOSE}"
