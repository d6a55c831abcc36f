"""Harmony: ``<|channel|>commentary to=functions.NAME<|message|>{...}<|call|>``: GPT-OSS.

Reasoning is in the channel analysis, the answer in final, and commentary without a recipient is content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from strop.tools.base import ParsedReply, ToolSchema
from strop.tools.formats.reading import MalformedCall, named_call, read_whole_json
from strop.types import ToolCall

_END = re.compile(r"<\|(?:end|call|return)\|>")
_TO = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass(frozen=True)
class GptOssFormat:
    name: str = "gpt_oss"
    stop_strings: Sequence[str] = ("<|call|>",)
    inline_result: str | None = None

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedReply:
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        malformed: list[str] = []
        for message in text.split("<|start|>"):
            header, opened, body = message.partition("<|message|>")
            if not opened:
                content += [header] if header.strip() else []
                continue
            body, *after = _END.split(body)
            channel, recipient = _CHANNEL.search(header), _TO.search(header)
            if recipient is not None:
                try:
                    calls.append(_read(recipient[1], body))
                except MalformedCall as error:
                    malformed.append(f"A call to {recipient[1]} could not be read: {error}.")
            elif channel is not None and channel[1] == "analysis":
                reasoning.append(body)
            else:
                content.append(body)
            content += [each for each in after if each.strip()]
        return ParsedReply("\n".join(content).strip(), "\n".join(reasoning).strip(), tuple(calls), tuple(malformed))

    def example(self, name: str) -> str:
        return f'<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{{"ARGUMENT": "VALUE"}}<|call|>'


def _read(recipient: str, body: str) -> ToolCall:
    namespace, dot, name = recipient.partition(".")
    if namespace != "functions" or not dot:
        raise MalformedCall("calls go to functions.NAME")
    return named_call(name, read_whole_json(body))
