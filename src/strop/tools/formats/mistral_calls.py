"""``[TOOL_CALLS]`` and a list of calls, or ``[TOOL_CALLS]NAME[ARGS]{...}`` for each: Mistral, Magistral, Devstral."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from strop.thoughts import split_thoughts
from strop.tools.base import ParsedReply, ToolSchema
from strop.tools.formats.reading import MalformedCall, make_call, named_call, read_whole_json
from strop.types import ToolCall

TAG, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_HEAD = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*([^\s\[\]]*)\s*)?")


@dataclass(frozen=True)
class MistralFormat:
    name: str = "mistral"
    stop_strings: Sequence[str] = ()  # a list of calls ends with the turn
    inline_result: str | None = None

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedReply:
        reasoning, rest = split_thoughts(text)
        content, *parts = rest.removesuffix("</s>").split(TAG)
        calls: list[ToolCall] = []
        malformed: list[str] = []
        for part in parts:
            try:
                calls += _read(part)
            except MalformedCall as error:
                malformed.append(f"What follows {TAG} could not be read: {error}.")
        return ParsedReply(content.strip(), reasoning, tuple(calls), tuple(malformed))

    def example(self, name: str) -> str:
        return f'{TAG}[{{"name": "{name}", "arguments": {{"ARGUMENT": "VALUE"}}}}]'


def _read(part: str) -> list[ToolCall]:
    head, named, body = part.partition(ARGUMENTS)
    match = _HEAD.fullmatch(head) if named else None
    if match is not None:
        return [named_call(match[1], read_whole_json(body), match[2] or "")]
    value = read_whole_json(part)
    if not isinstance(value, list) or not value:
        raise MalformedCall("it is not a list of calls")
    return [make_call(each, extra=("id", "type")) for each in value]
