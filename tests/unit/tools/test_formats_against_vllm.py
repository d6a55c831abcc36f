"""vLLM's own parsers of tool calls, on the same texts. Where the two differ, ours says what is wrong, or vLLM's sees fewer calls.

vLLM's parsers serve: they take calls that are not closed, arguments that are no object and keys that stand twice, and turn all calls of a
reply into text if one of them cannot be read. Its Mistral parser reads the first list of calls alone, and each of its DeepSeek parsers
knows one generation.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.tools.call_formats import FORMATS
from support.tool_families import TOOL_FAMILIES
from unit.tools.test_formats import MALFORMED, READ, SCHEMA

pytestmark = pytest.mark.exhaustive  # importing vLLM takes most of a minute
PARSERS = {
    "hermes": ("hermes", "qwen3"),
    "llama3_json": ("llama3_json", "llama3.1"),
    "mistral": ("mistral", "mistral"),
    "deepseek_v3": ("deepseek", "deepseek_v3"),
    "deepseek_v31": ("deepseek", "deepseek_v3"),
    "qwen3_xml": ("qwen_xml", "qwen3.6"),
}


@cache
def _kind(name: str) -> tuple[Any, Any, Any]:
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    tokenizer = TOOL_FAMILIES[PARSERS[name][1]].make_template().tokenizer
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], model="m", tools=[SCHEMA])
    return ToolParserManager.get_tool_parser(name), tokenizer, request


def theirs(name: str, text: str) -> list[tuple[str, Any]]:
    kind, tokenizer, request = _kind(name)
    found = kind(tokenizer, request.tools).extract_tool_calls(text, request)
    return [(call.function.name, _arguments(call.function.arguments)) for call in found.tool_calls]


def _arguments(text: str) -> Any:
    """Read arguments, which vLLM's DeepSeek parsers hand on as they find them."""
    try:
        return json.loads(text or "null")
    except ValueError:
        return text


def check(name: str, text: str) -> None:
    reply = FORMATS[PARSERS[name][0]].parse(text, [SCHEMA])
    ours = [(call.name, dict(call.arguments)) for call in reply.calls]
    found = theirs(name, text)
    assert found == ours[: len(found)] or reply.malformed, (text, found, ours)


@pytest.mark.parametrize("name", PARSERS)
def test_vllm_reads_the_same_calls_or_the_policy_is_told_why_not(name: str) -> None:
    for each, text, _ in [*READ, *MALFORMED]:
        if each == PARSERS[name][0] and len(text) < 5000:
            check(name, text)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_vllm_reads_the_same_of_random_texts(name: str, data: st.DataObject) -> None:
    written = [text for each, text, _ in READ if each == PARSERS[name][0]]
    text = "".join(data.draw(st.lists(st.sampled_from([*written, "\n", " ", "Well.", "{", "}", "7"]), max_size=4)))
    cut = data.draw(st.integers(0, len(text)))
    check(name, text[:cut] + text[cut + data.draw(st.integers(0, 3)) :])
