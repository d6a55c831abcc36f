"""How models write tool calls, a class per form, and the choice of the form by the chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strop import plugins
from strop.thoughts import split_thoughts
from strop.tools.base import ParsedReply, ToolCallFormat, ToolConfigError, ToolSchema
from strop.tools.call_reading import MalformedCall, make_call, named_call, read_argument, read_json, read_whole_json, skip_space
from strop.types import ToolCall
from strop.user_code import suggest_names

OPEN, CLOSE = "<tool_call>", "</tool_call>"
RESULT = "\n<tool_response>\n{result}\n</tool_response>\n"

ReadCall = Callable[
    [str], tuple[ToolCall, int]
]  # the text after OPEN -> its call, and the position after CLOSE; or MalformedCall


def parse_tagged_calls(
    text: str, read: ReadCall, *, stray: Sequence[str] = (CLOSE,), says: str = f"{CLOSE} closes no {OPEN}."
) -> ParsedReply:
    """Parse a turn. Text outside of a call that contains one of ``stray`` is malformed, with the message ``says``."""
    reasoning, rest = split_thoughts(text, call=(OPEN, CLOSE))
    content: list[str] = []
    calls: list[ToolCall] = []
    malformed: list[str] = []
    while True:
        before, opened, rest = rest.partition(OPEN)
        content.append(before)
        if any(mark in before for mark in stray):
            malformed.append(says)
        if not opened:
            return ParsedReply("".join(content).strip(), reasoning, tuple(calls), tuple(malformed))
        try:
            call, end = read(rest)
            calls.append(call)
        except MalformedCall as error:
            malformed.append(f"A call between {OPEN} and {CLOSE} could not be read: {error}.")
            close = rest.find(CLOSE)
            end = len(rest) if close < 0 else close + len(CLOSE)
        rest = rest[end:]


def read_xml_call(
    text: str, call: re.Pattern[str], argument: re.Pattern[str], shapes: tuple[str, str], tools: Sequence[ToolSchema]
) -> tuple[ToolCall, int]:
    """Parse a call whose first group is its name and second its arguments, each a key and a value. ``shapes``: both, in words for
    errors.
    """
    body, closed, _ = text.partition(CLOSE)
    if not closed:
        raise MalformedCall(f"it is not closed by {CLOSE}")
    if (found := call.match(body)) is None:
        raise MalformedCall(f"it is not {shapes[0]}")
    name, inside = found[1].strip(), found[2] or ""
    arguments: dict[str, Any] = {}
    position = 0
    while (each := argument.match(inside, position)) is not None:
        key, value = each[1], each[2]
        if key in arguments:
            raise MalformedCall(f"the argument {key} of {name} is given twice")
        arguments[key] = read_argument(key, unwrap_lines(value), name, tools)
        position = each.end()
    if left := inside[position:].strip():
        raise MalformedCall(f"{left!r:.60} is not {shapes[1]}")
    return named_call(name, arguments), len(body) + len(CLOSE)


def unwrap_lines(value: str) -> str:
    """Remove the line breaks after the opening tag and before the closing tag, which are not part of a value."""
    return value.removeprefix("\n").removesuffix("\n")


@dataclass(frozen=True)
class HermesFormat:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5, Qwen3 and many others."""

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


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
_QWEN_SHAPES = ("<function=NAME> ... </function>", "<parameter=NAME> ... </parameter>")
_STRAY = (CLOSE, "<function=")


@dataclass(frozen=True)
class QwenXmlFormat:
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: Qwen3-Coder, Nemotron 3."""

    name: str = "qwen_xml"
    stop_strings: Sequence[str] = (CLOSE,)
    inline_result: str | None = RESULT

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedReply:
        says = f"A call begins with {OPEN} and ends with {CLOSE}; one of them is missing."
        return parse_tagged_calls(
            text, lambda rest: read_xml_call(rest, _FUNCTION, _PARAMETER, _QWEN_SHAPES, tools), stray=_STRAY, says=says
        )

    def example(self, name: str) -> str:
        return f"{OPEN}\n<function={name}>\n<parameter=ARGUMENT>\nVALUE\n</parameter>\n</function>\n{CLOSE}"


_CALL = re.compile(r"\s*<name>([^<]*)</name>\s*(?:<arguments>(.*)</arguments>|<arguments\s*/>)?\s*\Z", re.DOTALL)
_ARGUMENT = re.compile(r"\s*<([A-Za-z_][\w.-]*)>(.*?)</\1>", re.DOTALL)
_PLAIN_SHAPES = ("<name>NAME</name> and <arguments> ... </arguments>", "<ARGUMENT>VALUE</ARGUMENT>")


@dataclass(frozen=True)
class XmlFormat:
    """``<tool_call><name>NAME</name><arguments><KEY>VALUE</KEY></arguments></tool_call>``: plain XML, independent of model families."""

    name: str = "xml"
    stop_strings: Sequence[str] = (CLOSE,)
    inline_result: str | None = RESULT

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedReply:
        return parse_tagged_calls(text, lambda rest: read_xml_call(rest, _CALL, _ARGUMENT, _PLAIN_SHAPES, tools))

    def example(self, name: str) -> str:
        return f"{OPEN}\n<name>{name}</name>\n<arguments>\n<ARGUMENT>VALUE</ARGUMENT>\n</arguments>\n{CLOSE}"


CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCED = re.compile(r"([^\n]*)\n```json\n(.*)\n```\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class DeepSeekFormat:
    """``<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>...``. V3 and R1 write the type, the name and fenced JSON, V3.1 name and JSON."""

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
                calls.append(_read_deepseek(part))
            except MalformedCall as error:
                problems.append(f"A call after {CALL} could not be read: {error}.")
        more = self.parse(after.replace("<｜end▁of▁sentence｜>", "")) if after else ParsedReply("")
        said = (content + more.content).strip()
        return ParsedReply(said, reasoning, (*calls, *more.calls), (*problems, *more.malformed))

    def example(self, name: str) -> str:
        return f'{CALLS}{CALL}{name}{SEPARATOR}{{"ARGUMENT": "VALUE"}}{CALL_END}{CALLS_END}'


def _read_deepseek(part: str) -> ToolCall:
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


_END = re.compile(r"<\|(?:end|call|return)\|>")
_TO = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass(frozen=True)
class GptOssFormat:
    """Harmony. Reasoning is in the channel analysis, the answer in final, and commentary without a recipient is content."""

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
                    calls.append(_read_gpt_oss(recipient[1], body))
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


def _read_gpt_oss(recipient: str, body: str) -> ToolCall:
    namespace, dot, name = recipient.partition(".")
    if namespace != "functions" or not dot:
        raise MalformedCall("calls go to functions.NAME")
    return named_call(name, read_whole_json(body))


LLAMA_TAG = "<|python_tag|>"
_BEGINS = re.compile(r'\{\s*"(?:name|type|function|parameters)"\s*:')  # an answer may begin with a brace, too


@dataclass(frozen=True)
class Llama3JsonFormat:
    """``{"name": ..., "parameters": {...}}`` as the whole reply: Llama 3.1 to 3.3. Several calls are separated by semicolons."""

    name: str = "llama3_json"
    stop_strings: Sequence[str] = ("<|eom_id|>",)
    inline_result: str | None = None

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedReply:
        reasoning, rest = split_thoughts(text)
        rest = rest.removesuffix("<|eom_id|>").strip()
        tagged = rest.startswith(LLAMA_TAG)
        body = rest.removeprefix(LLAMA_TAG).strip()
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
    late = LLAMA_TAG in text
    for begin in _BEGINS.finditer(text):
        try:
            value, _ = read_json(text, begin.start())
            make_call(value, arguments=("parameters", "arguments"), extra=("type", "id"))
        except MalformedCall:
            continue
        late = True
    return ("There is text before a call; a call must be the whole reply.",) if late else ()


MISTRAL_TAG, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_HEAD = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*([^\s\[\]]*)\s*)?")


@dataclass(frozen=True)
class MistralFormat:
    """``[TOOL_CALLS]`` and a list of calls, or ``[TOOL_CALLS]NAME[ARGS]{...}`` for each: Mistral, Magistral, Devstral."""

    name: str = "mistral"
    stop_strings: Sequence[str] = ()  # a list of calls ends with the turn
    inline_result: str | None = None

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedReply:
        reasoning, rest = split_thoughts(text)
        content, *parts = rest.removesuffix("</s>").split(MISTRAL_TAG)
        calls: list[ToolCall] = []
        malformed: list[str] = []
        for part in parts:
            try:
                calls += _read_mistral(part)
            except MalformedCall as error:
                malformed.append(f"What follows {MISTRAL_TAG} could not be read: {error}.")
        return ParsedReply(content.strip(), reasoning, tuple(calls), tuple(malformed))

    def example(self, name: str) -> str:
        return f'{MISTRAL_TAG}[{{"name": "{name}", "arguments": {{"ARGUMENT": "VALUE"}}}}]'


def _read_mistral(part: str) -> list[ToolCall]:
    head, named, body = part.partition(ARGUMENTS)
    match = _HEAD.fullmatch(head) if named else None
    if match is not None:
        return [named_call(match[1], read_whole_json(body), match[2] or "")]
    value = read_whole_json(part)
    if not isinstance(value, list) or not value:
        raise MalformedCall("it is not a list of calls")
    return [make_call(each, extra=("id", "type")) for each in value]


FORMATS: Final[dict[str, ToolCallFormat]] = {
    each.name: each
    for each in (
        HermesFormat(),
        QwenXmlFormat(),
        XmlFormat(),
        Llama3JsonFormat(),
        MistralFormat(),
        GptOssFormat(),
        DeepSeekFormat(),
    )
}
PROBE = ToolCall("probe_tool", {"text": "two words"}, id="call00000")


def choose_format(name: str | None, write: Callable[[ToolCall], tuple[str, str] | None]) -> ToolCallFormat:
    """Return the format ``name``, or if it is None the one that parses the output of ``write``. Raises ToolConfigError.

    ``write`` renders a call with the chat template: as sampled by the policy, plus the token that ends the turn. None: no calls.
    """
    known = [*FORMATS, *plugins.declared("tool_call_formats")]
    if name is not None:
        if name not in known:
            raise ToolConfigError(f"policy.tokenizer.tool_call_format is {name!r}{suggest_names(name, known)}")
        return _load(name)
    written = write(PROBE)
    if written is not None:
        for text in (written[0], "".join(written)):  # some templates omit the end of a single call
            for each in map(_load, known):
                if [(call.name, dict(call.arguments)) for call in each.parse(text).calls] == [(PROBE.name, PROBE.arguments)]:
                    return each
    what = "writes no tool calls" if written is None else f"writes calls in an unknown form: {written[0]!r:.200}"
    raise ToolConfigError(
        f"the environment has tools, but the chat template {what}; set policy.tokenizer.tool_call_format to the form in which the model "
        f"is to write them ({', '.join(known)}), or policy.tokenizer.chat_template to a template with tools"
    )


def _load(name: str) -> ToolCallFormat:
    return FORMATS.get(name) or plugins.load("tool_call_formats", name)
