"""How models write calls: what is read, and what is told of a call that cannot be read."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop import plugins
from strop.tools.base import ParsedReply, ToolConfigError
from strop.tools.call_formats import FORMATS, choose_format
from strop.types import ToolCall

SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": ["number", "null"]}, "note": {"type": "string"}},
        },
    },
}
CALL = '{"name": "add", "arguments": {"a": 1, "b": 2.5}}'
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
# What is written -> the names and arguments that are read.
READ: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", [("add", {"a": 1, "b": 2.5})]),
    ("hermes", f"Well.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", [("add", {"a": 1, "b": 2.5})] * 2),
    (
        "hermes",
        '<tool_call>{"name": "say", "arguments": {"text": "</tool_call> {"}}</tool_call>',
        [("say", {"text": "</tool_call> {"})],
    ),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', [("now", {})]),
    (
        "qwen_xml",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n7\n</parameter>\n</function>\n</tool_call>",
        [("add", {"a": 1, "note": "7"})],
    ),
    ("qwen_xml", "<tool_call><function=now></function></tool_call>", [("now", {})]),
    (
        "qwen_xml",
        "<tool_call><function=run><parameter=code>\nx = 1\n\nprint(x)\n</parameter></function></tool_call>",
        [("run", {"code": "x = 1\n\nprint(x)"})],
    ),
    ("xml", "<tool_call><name>add</name><arguments><a>1</a><b>null</b></arguments></tool_call>", [("add", {"a": 1, "b": None})]),
    ("xml", "<tool_call>\n<name>now</name>\n</tool_call>", [("now", {})]),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
        [("add", {"a": 1}), ("now", {})],
    ),
    ("llama3_json", '{"type": "function", "name": "add", "arguments": {"a": 1}}<|eom_id|>', [("add", {"a": 1})]),
    ("mistral", f"Well.[TOOL_CALLS] [{CALL}]", [("add", {"a": 1, "b": 2.5})]),
    ("mistral", f'[TOOL_CALLS][{CALL[:-1]}, "id": "abcdefghi"}}]</s>', [("add", {"a": 1, "b": 2.5})]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}', [("add", {"a": 1}), ("now", {})]),
    ("gpt_oss", '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>', [("add", {"a": 1})]),
    ("gpt_oss", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', [("add", {"a": 1})]),
    ("deepseek", DEEPSEEK.format('function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```'), [("add", {"a": 1})]),
    ("deepseek", DEEPSEEK.format('add<｜tool▁sep｜>{"a": 1}'), [("add", {"a": 1})]),
]
# What is written -> a part of what the policy is told.
MALFORMED = [
    ("hermes", "<tool_call>{'name': 'add'}</tool_call>", "not valid JSON"),
    ("hermes", f"<tool_call>{CALL}", "not closed"),
    ("hermes", f"{CALL}</tool_call>", "closes no <tool_call>"),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', 'an object with "name" and "arguments"'),
    ("hermes", '<tool_call>{"name": "add", "arguments": "a"}</tool_call>', "not an object of arguments"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>', "a key twice"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e400}}</tool_call>', "1e400, which is too large"),
    ("hermes", '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 100_000 + "</tool_call>", "cannot be read"),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "no name of a tool"),
    ("hermes", "<tool_call>[1]</tool_call>", "no JSON object"),
    ("qwen_xml", "<tool_call><function=add><parameter=a>one</parameter></function></tool_call>", "must be of type integer"),
    ("qwen_xml", "<tool_call><function=add><parameter=a>1</function></tool_call>", "is not <parameter=NAME>"),
    ("qwen_xml", "<tool_call>add</tool_call>", "is not <function=NAME>"),
    ("qwen_xml", "<function=add></function></tool_call>", "one of them is missing"),
    ("xml", "<tool_call><name>add</name><arguments><a>1</b></arguments></tool_call>", "is not <ARGUMENT>"),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}', "not valid JSON"),
    ("llama3_json", '{"name": "add", "parameters": {}} and more', "separated by ;"),
    ("llama3_json", "<|python_tag|>print(1)", "not valid JSON"),
    ("llama3_json", 'Well. {"name": "add", "parameters": {}}', "There is text before a call"),
    ("mistral", "[TOOL_CALLS]add", "not valid JSON"),
    ("mistral", "[TOOL_CALLS][]", "not a list of calls"),
    ("mistral", "[TOOL_CALLS]add[ARGS]{", "not valid JSON"),
    ("gpt_oss", "<|channel|>commentary to=functions.add<|message|>{<|call|>", "not valid JSON"),
    ("gpt_oss", "<|channel|>commentary to=python<|message|>1<|call|>", "functions.NAME"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "not closed"),
    ("deepseek", DEEPSEEK.format("add{}"), "has no <｜tool▁sep｜>"),
    ("deepseek", DEEPSEEK.format("python<｜tool▁sep｜>add\n```json\n{}\n```"), "of type function"),
    ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}", "without <｜tool▁calls▁begin｜>"),
]


def calls_of(reply: ParsedReply) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, dict(call.arguments)) for call in reply.calls]


@pytest.mark.parametrize(("name", "text", "calls"), READ)
def test_a_call_is_read(name: str, text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    reply = FORMATS[name].parse(text, [SCHEMA])
    assert calls_of(reply) == calls and not reply.malformed


@pytest.mark.parametrize(("name", "text", "told"), MALFORMED)
def test_a_call_that_cannot_be_read_is_told(name: str, text: str, told: str) -> None:
    reply = FORMATS[name].parse(text, [SCHEMA])
    assert any(told in why for why in reply.malformed), reply


def test_one_bad_call_among_good_ones_is_told_and_the_others_are_read() -> None:
    reply = FORMATS["hermes"].parse(f"<tool_call>{CALL}</tool_call><tool_call>oh</tool_call> hm <tool_call>{CALL}</tool_call>")
    assert len(reply.calls) == 2 and len(reply.malformed) == 1 and reply.content == "hm"


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "gpt_oss"])
def test_calls_come_after_reasoning_and_calls_inside_it_are_none(name: str) -> None:
    example = FORMATS[name].example("add")
    reply = FORMATS[name].parse(f"<think>maybe {example}</think>\n{example}")
    assert [call.name for call in reply.calls] == ["add"] and reply.reasoning.startswith("maybe")
    unclosed = FORMATS[name].parse(f"<think>maybe {example}")
    assert not unclosed.asks_for_tools and unclosed.content == ""


def test_the_channels_of_harmony_are_told_apart() -> None:
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    reply = FORMATS["gpt_oss"].parse(text)
    assert (reply.reasoning, reply.content, calls_of(reply)) == ("hm", "I look.", [("add", {"a": 1})])
    final = FORMATS["gpt_oss"].parse(
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>3<|return|>"
    )
    assert (final.reasoning, final.content, final.calls) == ("hm", "3", ())


@pytest.mark.parametrize("name", FORMATS)
def test_text_without_calls_is_content(name: str) -> None:
    for text in ("The answer is {1, 2}.", "{x} is a set", "", "a < b > c", "[1, 2]"):
        assert FORMATS[name].parse(text) == ParsedReply(text)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_text_breaks_a_format(name: str, data: st.DataObject) -> None:
    pieces = [
        *FORMATS[name].example("add").replace("{", "|{|").split("|"),
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        '"',
        "}",
    ]
    pieces += ["[TOOL_CALLS]", "[ARGS]", "<|message|>", "<|start|>", "<function=", "<parameter=a>", "\ud800", "\n", "add", ";"]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces) | st.text(max_size=4), max_size=12)))
    reply = FORMATS[name].parse(text, [SCHEMA])
    assert all(isinstance(call.name, str) for call in reply.calls) and all(reply.malformed)


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(max_size=30).filter(lambda text: "\0" not in text),
    number=st.integers() | st.floats(allow_nan=False, allow_infinity=False),
)
def test_what_json_formats_write_is_read_back(text: str, number: float) -> None:
    arguments = {"note": text, "b": number}
    body = json.dumps(arguments)
    written = {
        "hermes": f'<tool_call>\n{{"name": "add", "arguments": {body}}}\n</tool_call>',
        "llama3_json": f'{{"name": "add", "parameters": {body}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "add", "arguments": {body}}}]',
        "gpt_oss": f"<|channel|>commentary to=functions.add<|message|>{body}<|call|>",
        "deepseek": DEEPSEEK.format(f"add<｜tool▁sep｜>{body}"),
    }
    for name, each in written.items():
        assert calls_of(FORMATS[name].parse(each)) == [("add", arguments)], name


class Shouted:
    """Calls as another package's models write them."""

    name, stop_strings, inline_result = "shouted", (), None

    def parse(self, text: str, tools: Any = ()) -> ParsedReply:
        name, _, arguments = text.removeprefix("CALL ").partition(" ")
        calls = [ToolCall(name, json.loads(arguments))] if text.startswith("CALL ") else []
        return ParsedReply("", calls=tuple(calls))


SHOUTED = Shouted()


def test_a_form_of_another_package_is_found_by_what_the_template_writes_and_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(call: ToolCall) -> tuple[str, str]:
        return f"CALL {call.name} {json.dumps(dict(call.arguments))}", ""

    with pytest.raises(ToolConfigError, match="an unknown form: 'CALL probe_tool"):
        choose_format(None, write)
    point = EntryPoint("shouted", f"{__name__}:SHOUTED", "strop.tool_call_formats")
    monkeypatch.setattr(plugins, "declared", lambda group: {"shouted": point} if group == "tool_call_formats" else {})
    assert choose_format(None, write) is SHOUTED and choose_format("shouted", write) is SHOUTED
    with pytest.raises(ToolConfigError, match=r"'shoutet'.*shouted"):
        choose_format("shoutet", write)
