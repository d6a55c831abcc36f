"""``<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>...``: DeepSeek. V3 and R1 write the type, the name and fenced JSON, V3.1 name and JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from strop.thoughts import split_thoughts
from strop.tools.base import ParsedReply, ToolSchema
from strop.tools.formats.reading import MalformedCall, named_call, read_whole_json
from strop.types import ToolCall

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCED = re.compile(r"([^\n]*)\n```json\n(.*)\n```\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class DeepSeekFormat:
    name: str = "deepseek"
    stop_strings: Sequence[str] = (CALLS_END,)
    inline_result: str | None = None

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedReply:
        reasoning, rest = split_thoughts(text, call=(CALLS, CALLS_END))
        content, opened, body = rest.partition(CALLS)
        stray = [f"{marker} without {CALLS} before it." for marker in (CALL, CALL_END, CALLS_END) if marker in content][:1]
        if not opened:
            return ParsedReply(rest.strip(), reasoning, (), tuple(stray))
        inside, closed, after = body.partition(CALLS_END)
        calls: list[ToolCall] = []
        problems = stray if closed else [*stray, f"{CALLS} is not closed by {CALLS_END}."]
        before, *parts = inside.split(CALL)
        if before.strip() or not parts:
            problems.append(f"{CALLS} is followed by {before.strip()!r:.60} in place of {CALL}.")
        for part in parts:
            try:
                calls.append(_read(part))
            except MalformedCall as error:
                problems.append(f"A call after {CALL} could not be read: {error}.")
        more = self.parse(after.replace("<｜end▁of▁sentence｜>", "")) if after else ParsedReply("")
        said = (content + more.content).strip()
        return ParsedReply(said, reasoning, (*calls, *more.calls), (*problems, *more.malformed))

    def example(self, name: str) -> str:
        return f'{CALLS}{CALL}{name}{SEPARATOR}{{"ARGUMENT": "VALUE"}}{CALL_END}{CALLS_END}'


def _read(part: str) -> ToolCall:
    body, closed, after = part.partition(CALL_END)
    if not closed or after.strip():
        raise MalformedCall(f"it is not closed by {CALL_END}" if not closed else f"{after.strip()!r:.60} follows it")
    head, separated, rest = body.partition(SEPARATOR)
    if not separated:
        raise MalformedCall(f"it has no {SEPARATOR}")
    if (fenced := _FENCED.match(rest)) is not None:
        if head.strip() != "function":
            raise MalformedCall(f"its type is {head.strip()!r:.60}, and calls are of type function")
        return named_call(fenced[1], read_whole_json(fenced[2]))
    return named_call(head, read_whole_json(rest))
