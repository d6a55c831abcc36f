"""Calls as Hermes and Qwen models write them: JSON between <tool_call> tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from strop.tools.base import ParsedReply
from strop.types import ToolCall

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


def split_reasoning(text: str) -> tuple[str, str]:
    """Return (reasoning, the rest): what stands before </think>, whether the prompt or the policy opened it."""
    opened = text.lstrip().startswith("<think>")
    if not opened and "</think>" not in text:
        return "", text
    reasoning, _, rest = text.partition("</think>")
    return reasoning.replace("<think>", "", 1).strip("\n"), rest.lstrip("\n")


class HermesCalls:
    """A ``ToolCallFormat``."""

    name = "hermes"
    stop_strings: Sequence[str] = ()

    def parse(self, text: str) -> ParsedReply:
        reasoning, rest = split_reasoning(text)
        calls: list[ToolCall] = []
        malformed: list[str] = []
        for found in _CALL.findall(rest):
            try:
                calls.append(_read_call(json.loads(found)))
            except (ValueError, RecursionError) as error:
                malformed.append(f"a call could not be read: {error}")
        if malformed:
            return ParsedReply(rest, reasoning, tuple(calls), tuple(malformed))
        return ParsedReply(_CALL.sub("", rest).strip("\n") if calls else rest, reasoning, tuple(calls))


def _read_call(found: object) -> ToolCall:
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        raise ValueError("it must be an object with a name and arguments")
    arguments = found.get("arguments", {})
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments must be an object; found {type(arguments).__name__}")
    return ToolCall(found["name"], arguments)
