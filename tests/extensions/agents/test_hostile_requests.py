"""Whatever a request holds, it is answered or refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loop.tiny import tiny_model
from strop.extensions.agents.gateway.messages_api import make_chat_body as read_messages_body
from strop.extensions.agents.gateway.responses_api import make_chat_body
from strop.extensions.serve.chat_message import read_parts
from strop.generation.torch.torch_engine import TorchEngine
from strop.models.network import Network
from strop.safety.site_guard import BadRequest
from strop.types import Rollout
from support.agents import END, TEMPLATE, TOKENIZER, Recorder, make_session, play
from support.hostile_bodies import DEEP, REFUSED, draw_bodies, send
from support.torch_engine import make_engine, make_runner

NAMES = (
    "messages", "role", "content", "tool_calls", "function", "name", "arguments", "type", "text", "input", "prompt", "tools", "n", "stop",
    "tool_choice", "max_tokens", "temperature", "stream", "logprobs", "stream_options", "previous_response_id", "instructions", "model",
    "tool_call_id", "call_id", "output", "summary", "reasoning_content", "parallel_tool_calls", "id", "parameters", "format",
    "system", "source", "thinking", "signature", "input_schema", "tool_use_id", "stop_sequences", "image_url", "url", "data",
)  # fmt: skip
WORDS = ("user", "assistant", "tool", "system", "developer", "function", "text", "message", "function_call", "reasoning", "{}", "[1]",
    "\udc80", "tool_use", "tool_result", "image", "base64", "thinking",
    "function_call_output", "input_text", "<tool_call>", "required", "none")  # fmt: skip
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
@given(
    BODY, st.lists(MESSAGE, max_size=4), st.lists(ITEM, max_size=3), st.sampled_from(["chat", "text", "responses", "messages"])
)
def test_a_request_is_read_or_refused(body: Any, messages: list[Any], items: list[Any], kind: str) -> None:
    session = make_session(Recorder())
    if isinstance(body, dict) and messages:
        body = {**body, "messages": messages, "input": items or body.get("input")}
    try:
        reader = {"responses": lambda: make_chat_body(body, {}), "messages": lambda: read_messages_body(body)}
        read = reader[kind]() if kind in reader else body
        asked, _ = session.read(read, is_chat=kind != "text")
    except BadRequest as error:
        assert str(error) and 400 <= error.status < 500
        return
    assert asked.prompts and all(asked.prompts)


@pytest.mark.parametrize("url", ["a.png", "/etc/passwd", "file:///etc/passwd", None, 3, {"url": "a.png"}])
def test_an_image_of_this_machine_is_refused(url: object) -> None:
    for part in ({"type": "image_url", "image_url": {"url": url}}, {"type": "input_image", "image_url": url}):
        with pytest.raises(
            BadRequest, match=r"messages\[0\].content has an image without a URL: send it as data:image/png;base64"
        ):
            read_parts([{"type": "text", "text": "look"}, part], "messages[0]")


def test_an_image_for_a_model_that_reads_text_is_refused() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(BadRequest, match="a message has an image, and the model reads only text"):
        make_session(Recorder()).read({"messages": [{"role": "user", "content": [image]}]}, is_chat=True)


def play_with_engine(requests: list[tuple[str, Any]], *, more: int = 0, sampling: str = "run") -> tuple[Rollout, list[int]]:
    """Let an agent send requests to the real gateway and the real engine, then a good one. ``more``: ids that only the tokenizer has."""
    statuses: list[int] = []
    engine: list[TorchEngine] = []

    async def generate(prompt: Any, **options: Any) -> Any:
        if not engine:
            model = tiny_model(len(TOKENIZER) - more)
            engine.append(make_engine(make_runner(Network(model), length=400), TOKENIZER, stop_ids=[END]))
        return await engine[0].generate(prompt, **options)

    def agent(task: Any, endpoint: Any) -> float:
        address = endpoint.base_url.removesuffix("/v1")
        key = {"Authorization": f"Bearer {endpoint.api_key}"}
        for path, body in requests:
            statuses.append(send(address, f"/v1/{path}", body, key)[0])
        good = {"messages": [{"role": "user", "content": "1+2?"}], "max_tokens": 4}
        statuses.append(send(address, "/v1/chat/completions", good, key)[0])
        return 1.0

    generator = Recorder()
    generator.generate = generate  # type: ignore[method-assign]
    rollout = play(agent, generator, environment={}, gateway={"sampling": sampling}, max_turns=4000, max_length=300)
    return rollout, statuses


def test_no_request_of_an_agent_ends_the_engine_or_its_episode() -> None:
    for sampling in ("run", "agent"):
        rollout, statuses = play_with_engine([*REFUSED, ("chat/completions", DEEP)], sampling=sampling)
        assert rollout.error is None and rollout.reward == 1.0
        assert all(400 <= status < 500 for status in statuses[:-1]) and statuses[-1] == 200, statuses
        assert rollout.metrics["gateway/requests"] == 1 and rollout.policy_turns


def test_a_fuzz_of_an_agents_requests_against_the_engine_ends_no_episode() -> None:
    rollout, statuses = play_with_engine(list(draw_bodies(35, 120)), sampling="agent")
    assert rollout.error is None and set(statuses) <= {200, 400} and statuses.count(200) > 20, statuses


def test_a_token_that_the_tokenizer_has_and_the_model_has_not_is_the_agents_error() -> None:
    rollout, statuses = play_with_engine([("completions", {"prompt": [len(TOKENIZER) - 1]})], more=1)
    assert statuses == [400, 200] and rollout.error is None and rollout.metrics["gateway/refused"] == 1
    assert TEMPLATE.longest_token == 64
