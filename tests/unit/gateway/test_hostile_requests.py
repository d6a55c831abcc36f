"""Whatever a request holds, it is answered or refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.gateway.bad_request import BadRequest
from strop.gateway.chat_message import read_content
from strop.gateway.responses_api import make_chat_body
from support.agents import Recorder, make_session

NAMES = (
    "messages", "role", "content", "tool_calls", "function", "name", "arguments", "type", "text", "input", "prompt", "tools", "n", "stop",
    "tool_choice", "max_tokens", "temperature", "stream", "logprobs", "stream_options", "previous_response_id", "instructions", "model",
    "tool_call_id", "call_id", "output", "summary", "reasoning_content", "parallel_tool_calls", "id", "parameters", "format",
)  # fmt: skip
WORDS = ("user", "assistant", "tool", "system", "developer", "function", "text", "message", "function_call", "reasoning", "{}", "[1]",
    "\udc80", "function_call_output", "input_text", "<tool_call>", "required", "none")  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers(-3, 200) | st.floats() | st.sampled_from(WORDS) | st.text(max_size=3)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6),
    max_leaves=12,
)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(WORDS[:5])}, optional={name: VALUES for name in NAMES[2:8]})
ITEM = st.fixed_dictionaries({"type": st.sampled_from(WORDS)}, optional={name: VALUES for name in NAMES if name != "type"})
BODY = VALUES | st.fixed_dictionaries({}, optional={name: VALUES for name in NAMES})


@settings(max_examples=60, deadline=None)
@given(BODY, st.lists(MESSAGE, max_size=4), st.lists(ITEM, max_size=3), st.sampled_from(["chat", "text", "responses"]))
def test_a_request_is_read_or_refused(body: Any, messages: list[Any], items: list[Any], kind: str) -> None:
    session = make_session(Recorder())
    if isinstance(body, dict) and messages:
        body = {**body, "messages": messages, "input": items or body.get("input")}
    try:
        read = make_chat_body(body, {}) if kind == "responses" else body
        asked, _ = session.read(read, is_chat=kind != "text")
    except BadRequest as error:
        assert str(error) and 400 <= error.status < 500
        return
    assert asked.prompts and all(asked.prompts)


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "input_image", "image_url": "a.png"}]
)
def test_an_image_is_refused_with_what_to_do_instead(part: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match=r"messages\[0\].content has an image, and agents talk to the policy in text alone"):
        read_content([{"type": "text", "text": "look"}, part], "messages[0]")
