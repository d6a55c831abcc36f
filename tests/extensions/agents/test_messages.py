"""Agents through the gateway with the real ``anthropic`` client: tokens as sampled, tools, thoughts, streams, limits, errors."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from strop.types import Ending
from support.agents import TOKENIZER, Recorder, check_tree, play

SCHEMA = {"type": "object", "properties": {}}
TOOLS: Any = [{"name": "add", "description": "Add.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 34}}</tool_call>'
THOUGHT = f"<think>\nadd them\n</think>\n\nI add.{CALL}"


def connect(endpoint: Any, **options: Any) -> anthropic.Anthropic:
    given = {"base_url": endpoint.environ["ANTHROPIC_BASE_URL"], "api_key": endpoint.api_key, "max_retries": 0}
    return anthropic.Anthropic(**{**given, **options})


def ask(client: anthropic.Anthropic, messages: list[Any], *, stream: bool = False, **options: Any) -> Any:
    """Return the message, gathered by the client from the events of a stream if there is one."""
    given = {"model": "claude", "max_tokens": 1000, "messages": messages, **options}
    if not stream:
        return client.messages.create(**given)
    with client.messages.stream(**given) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_stored_as_it_was_sampled_and_never_tokenized_again(stream: bool) -> None:
    generator = Recorder("the 12 thin", "34 in", "done")

    def agent(task: Any, endpoint: Any) -> str:
        client = connect(endpoint)
        cached = {"type": "text", "text": "Be the first.", "cache_control": {"type": "ephemeral"}}
        billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc;"}
        messages: list[Any] = [{"role": "user", "content": task.question}]
        for _ in range(3):
            reply = ask(client, messages, stream=stream, system=[billing, cached])
            assert reply.stop_reason == "end_turn" and reply.usage.input_tokens > 0
            assert reply.usage.output_tokens == len(generator.sampled[-1][1].tokens)
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "Go on."}]
        return reply.content[0].text

    rollout = play(agent, generator)
    assert rollout.error is None and rollout.ending is Ending.STOP and not rollout.branches
    whole = [*rollout.prompt.tolist(), *(token for turn in rollout.turns for token in turn.tokens.tolist())]
    assert TOKENIZER.decode(whole, skip_special_tokens=False) == (
        "<|im_start|>system\nBe the first.<|im_end|>\n<|im_start|>user\nWhat is 1+2?<|im_end|>\n<|im_start|>assistant\n"
        "the 12 thin<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
        "34 in<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\ndone<|im_end|>"
    )
    check_tree(rollout, generator.sampled)
    assert rollout.metrics["gateway/requests"] == 3 and rollout.metrics["gateway/rewritten"] == 0
    assert rollout.metrics["gateway/normalized"] == 0 and rollout.output == "done"


@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_thoughts_are_blocks_whole_and_streamed(stream: bool) -> None:
    generator = Recorder(THOUGHT, f"{CALL}{CALL}", "the sum is 46")

    def agent(task: Any, endpoint: Any) -> str:
        client = connect(endpoint)
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "12+34?"}]}]
        options: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "auto"}, "stream": stream}
        options["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        for kinds in (["thinking", "text", "tool_use"], ["tool_use", "tool_use"]):
            reply = ask(client, messages, **options)
            assert [block.type for block in reply.content] == kinds and reply.stop_reason == "tool_use"
            calls = [block for block in reply.content if block.type == "tool_use"]
            assert all(call.input == {"a": 12, "b": 34} and call.name == "add" for call in calls)
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "46"} for call in calls]
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
            if kinds[0] == "thinking":
                assert reply.content[0].thinking == "add them" and reply.content[0].signature
                results.append({"type": "text", "text": "Again."})  # after the result, in the same message
        return ask(client, messages, **options).content[0].text

    rollout = play(agent, generator, max_new_tokens=400)
    assert rollout.error is None and rollout.output == "the sum is 46"
    check_tree(rollout, generator.sampled)
    assert len(rollout.turns) == 5 and not rollout.branches
    assert rollout.metrics["gateway/normalized"] == rollout.metrics["gateway/rewritten"] == 0
    roles = ["user", "assistant", "tool", "user", "assistant", "tool", "tool", "assistant"]
    assert [message.role for message in rollout.messages] == roles and rollout.messages[1].reasoning == "add them"


def test_events_come_in_the_order_of_the_api() -> None:
    kinds: list[str] = []

    def agent(task: Any, endpoint: Any) -> None:
        given: Any = {"model": "claude", "max_tokens": 100, "tools": TOOLS, "messages": [{"role": "user", "content": "12+34?"}]}
        for event in connect(endpoint).messages.create(**given, stream=True):
            kinds.append(event.type)

    assert play(agent, Recorder(f"I add.{CALL}")).error is None
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", *block, *block, "message_delta", "message_stop"]


def test_retries_sub_agents_and_compaction_become_a_tree_across_both_apis() -> None:
    import openai

    generator = Recorder()

    def agent(task: Any, endpoint: Any) -> None:
        client = connect(endpoint)
        first = [{"role": "user", "content": "Plan."}]
        plan = ask(client, first).content[0].text
        ask(client, first)  # a retry
        talk = [*first, {"role": "assistant", "content": plan}, {"role": "user", "content": "Do it."}]
        done = ask(client, talk).content[0].text
        ask(client, [{"role": "user", "content": "Look."}], system="You are a helper.")  # a sub-agent
        ask(client, [{"role": "user", "content": f"Summary: {done}"}])  # a compaction
        other = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        messages: Any = [*talk, {"role": "assistant", "content": f"  {done}\n"}, {"role": "user", "content": "Last."}]
        other.chat.completions.create(model="m", messages=messages)

    rollout = play(agent, generator)
    assert rollout.error is None and len(rollout.branches) == 3 and len(rollout.policy_turns) == 6
    check_tree(rollout, generator.sampled)
    assert rollout.metrics["gateway/retries"] == 1 and rollout.metrics["gateway/rewritten"] == 0


def test_tokens_are_counted_without_a_turn() -> None:
    generator = Recorder()

    def agent(task: Any, endpoint: Any) -> None:
        client = connect(endpoint)
        messages: Any = [{"role": "user", "content": "Hi"}]
        counted = client.messages.count_tokens(model="claude", messages=messages, system="Be.", tools=TOOLS)
        reply = ask(client, messages, system="Be.", tools=TOOLS)
        assert counted.input_tokens == reply.usage.input_tokens == len(generator.sampled[0][0])
        assert (
            client.messages.count_tokens(model="claude", messages=[{"role": "user", "content": "x" * 2500}]).input_tokens > 2000
        )

    rollout = play(agent, generator, max_turns=1)
    assert rollout.error is None and rollout.ending is Ending.STOP and rollout.metrics["gateway/requests"] == 1


def test_why_a_message_ended_is_said() -> None:
    def agent(task: Any, endpoint: Any) -> None:
        client = connect(endpoint)
        hello: Any = [{"role": "user", "content": "Hi"}]
        assert ask(client, hello, max_tokens=2).stop_reason == "max_tokens"
        ended = ask(client, hello, stop_sequences=["ne", "no"])
        assert (ended.stop_reason, ended.stop_sequence, ended.content[0].text) == ("stop_sequence", "ne", "do")

    assert play(agent, Recorder("much too long", "done now")).error is None


def test_errors_are_anthropics() -> None:
    def agent(task: Any, endpoint: Any) -> float:
        client = connect(endpoint)
        hello: Any = [{"role": "user", "content": "x"}]
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: ") as caught:
            ask(client, [{"role": "user", "content": "x" * 3000}])
        assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index, call-overload]
        for refused, why in (
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
            ({"extra_body": {"mcp_servers": [{"url": "http://x"}]}}, "mcp_servers is not supported"),
            ({"extra_body": {"output_config": {"format": {"type": "json_schema"}}}}, "output_config.format is not supported"),
            ({"messages": [*hello, {"role": "assistant", "content": "I"}]}, "prefilling a reply is not supported"),
            ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "is of type 'document'"),
        ):
            with pytest.raises(anthropic.BadRequestError, match=why):
                ask(client, **{"messages": hello, **refused})
        with pytest.raises(anthropic.AuthenticationError, match="its episode has ended"):
            ask(connect(endpoint, api_key="sk-strop-guess"), hello)
        bearer = connect(endpoint, api_key=None, auth_token=endpoint.api_key)
        assert ask(bearer, hello).content[0].type == "text"
        return 0.5

    rollout = play(agent, environment={})
    assert rollout.error is None and rollout.reward == 0.5 and rollout.metrics["gateway/refused"] == 1


def test_an_error_of_the_engine_reaches_a_streaming_agent_as_an_event() -> None:
    class Broken(Recorder):
        async def generate(self, prompt: Any, **options: Any) -> Any:
            raise RuntimeError("the engine is gone")

    def agent(task: Any, endpoint: Any) -> float:
        with pytest.raises(anthropic.APIStatusError, match="its log says why"):
            ask(connect(endpoint), [{"role": "user", "content": "x"}], stream=True)
        return 1.0

    assert play(agent, Broken()).error == "RuntimeError: the engine is gone"
