"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5, Qwen3 and many others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strop.tools.base import ParsedReply, ToolSchema
from strop.tools.formats.reading import MalformedCall, make_call, read_json, skip_space
from strop.tools.formats.tagged_calls import CLOSE, OPEN, RESULT, parse_tagged_calls
from strop.types import ToolCall


@dataclass(frozen=True)
class HermesFormat:
    name: str = "hermes"
    stop_strings: Sequence[str] = (CLOSE,)
    inline_result: str | None = RESULT

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedReply:
        return parse_tagged_calls(text, _read)

    def example(self, name: str) -> str:
        return f'{OPEN}\n{{"name": "{name}", "arguments": {{"ARGUMENT": "VALUE"}}}}\n{CLOSE}'


def _read(text: str) -> tuple[ToolCall, int]:
    """Read the call after ``<tool_call>``. The JSON is read first: its texts may contain ``</tool_call>``."""
    value, end = read_json(text)
    end = skip_space(text, end)
    if not text.startswith(CLOSE, end):
        found = text[end : end + 30]
        raise MalformedCall(f"after its JSON stands {found!r} in place of {CLOSE}" if found else f"it is not closed by {CLOSE}")
    return make_call(value, extra=("id", "type")), end + len(CLOSE)
