"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5, Qwen3 and many others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strop.tools.base import ParsedReply, ToolSchema
from strop.tools.formats.reading import MalformedCall, make_call, read_json, skip_space, split_reasoning
from strop.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class HermesFormat:
    name: str = "hermes"
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
            try:
                call, end = _read(rest)
                calls.append(call)
            except MalformedCall as error:
                malformed.append(f"A call between {OPEN} and {CLOSE} could not be read: {error}.")
                close = rest.find(CLOSE)
                end = len(rest) if close < 0 else close + len(CLOSE)
            rest = rest[end:]
        return ParsedReply("".join(content).strip(), reasoning, tuple(calls), tuple(malformed))

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
