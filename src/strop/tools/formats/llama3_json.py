"""``{"name": ..., "parameters": {...}}`` as the whole reply: Llama 3.1 to 3.3. Several calls are separated by semicolons."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from strop.thoughts import split_thoughts
from strop.tools.base import ParsedReply, ToolSchema
from strop.tools.formats.reading import MalformedCall, make_call, read_json, skip_space
from strop.types import ToolCall

TAG = "<|python_tag|>"
_BEGINS = re.compile(r'\{\s*"(?:name|type|function|parameters)"\s*:')  # an answer may begin with a brace, too


@dataclass(frozen=True)
class Llama3JsonFormat:
    name: str = "llama3_json"
    stop_strings: Sequence[str] = ("<|eom_id|>",)
    inline_result: str | None = None

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedReply:
        reasoning, rest = split_thoughts(text)
        rest = rest.removesuffix("<|eom_id|>").strip()
        tagged = rest.startswith(TAG)
        body = rest.removeprefix(TAG).strip()
        if not tagged and not _BEGINS.match(body):
            return ParsedReply(rest, reasoning, malformed=_find_late_call(body))
        calls: list[ToolCall] = []
        try:
            position = 0
            while True:
                value, position = read_json(body, position)
                calls.append(make_call(value, arguments=("parameters", "arguments"), extra=("type", "id")))
                position = skip_space(body, position)
                if position == len(body):
                    return ParsedReply("", reasoning, tuple(calls))
                if body[position] != ";":
                    raise MalformedCall(f"after its JSON stands {body[position : position + 30]!r}; calls are separated by ;")
                position += 1
        except MalformedCall as error:
            return ParsedReply("", reasoning, tuple(calls), (f"A call could not be read: {error}.",))

    def example(self, name: str) -> str:
        return f'{{"name": "{name}", "parameters": {{"ARGUMENT": "VALUE"}}}}'


def _find_late_call(text: str) -> tuple[str, ...]:
    """Return an error message for a reply with other text before a call, which is neither a call in this format nor an answer."""
    late = TAG in text
    for begin in _BEGINS.finditer(text):
        try:
            value, _ = read_json(text, begin.start())
            make_call(value, arguments=("parameters", "arguments"), extra=("type", "id"))
        except MalformedCall:
            continue
        late = True
    return ("There is text before a call; a call must be the whole reply.",) if late else ()
