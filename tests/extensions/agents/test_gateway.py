"""Agents through the gateway with the real ``openai`` client: tokens as sampled, every API, limits, keys."""

from __future__ import annotations

import asyncio
import json
from contextvars import Context
from dataclasses import replace
from typing import Any

import openai
import pytest

from loop.tiny import tiny_tokenizer
from strop.models.chat_template import ChatTemplate
from strop.monitoring.waits import waiting
from strop.safety.site_guard import BadRequest
from strop.types import Ending
from support.agents import TOKENIZER, TOOL_CHATML, Recorder, check_tree, ids, make_session, play

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 34}}</tool_call>'


def connect(endpoint: Any, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": endpoint.base_url, "api_key": endpoint.api_key, "max_retries": 0, **options})


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model="gpt-4o", messages=messages, **options)


def test_a_conversation_is_stored_as_it_was_sampled_and_never_tokenized_again() -> None:
    generator = Recorder("the 12 thin", "34 in", "done")

    def agent(task: Any, endpoint: Any) -> str:
        client = connect(endpoint)
        messages: list[Any] = [{"role": "system", "content": "Be the first."}, {"role": "user", "content": task.question}]
        for _ in range(3):
            reply = ask(client, messages).choices[0].message
            messages += [reply, {"role": "user", "content": "Go on."}]
        return reply.content

    rollout = play(agent, generator)
    assert rollout.error is None and rollout.ending is Ending.STOP and not rollout.branches
    assert [turn.author for turn in rollout.turns] == ["policy", "environment", "policy", "environment", "policy"]
    assert rollout.turns[0].tokens.tolist() != TOKENIZER("the 12 thin<|im_end|>", add_special_tokens=False)["input_ids"]
    assert rollout.output == rollout.text == "done"
    assert [message.content for message in rollout.messages][-3:] == ["34 in", "Go on.", "done"]
    assert [message.role for message in rollout.prompt_messages] == ["system", "user"]
    whole = [*rollout.prompt.tolist(), *(token for turn in rollout.turns for token in turn.tokens.tolist())]
    assert TOKENIZER.decode(whole, skip_special_tokens=False) == (
        "<|im_start|>system\nBe the first.<|im_end|>\n<|im_start|>user\nWhat is 1+2?<|im_end|>\n<|im_start|>assistant\n"
        "the 12 thin<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
        "34 in<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\ndone<|im_end|>"
    )
    check_tree(rollout, generator.sampled)
    assert rollout.metrics["gateway/requests"] == 3 and rollout.metrics["gateway/rewritten"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_answered_whole_and_streamed(stream: bool) -> None:
    generator = Recorder(f"<think>\nadd them\n</think>\n\nI add.{CALL}", "the sum is 46")

    def agent(task: Any, endpoint: Any) -> str:
        client = connect(endpoint)
        messages: list[Any] = [{"role": "user", "content": "12+34?"}]
        options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "auto"}
        if stream:
            content, reasoning, calls, reason = "", "", [], None
            for chunk in ask(client, messages, stream=True, stream_options={"include_usage": True}, **options):
                for choice in chunk.choices:
                    content += choice.delta.content or ""
                    reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                    calls += choice.delta.tool_calls or []
                    reason = choice.finish_reason or reason
            assert chunk.usage.completion_tokens > 0
            (call,) = calls
            reply = {
                "role": "assistant",
                "content": content,
                "reasoning_content": reasoning,
                "tool_calls": [{"id": call.id, "type": "function", "function": call.function.model_dump()}],
            }
        else:
            choice = ask(client, messages, **options).choices[0]
            reason, reasoning, (call,) = choice.finish_reason, choice.message.reasoning_content, choice.message.tool_calls
            reply = choice.message.model_dump(exclude_none=True)
        assert reason == "tool_calls" and reasoning == "add them" and call.function.name == "add"
        assert json.loads(call.function.arguments) == {"a": 12, "b": 34} and len(call.id) == 9
        messages += [reply, {"role": "tool", "tool_call_id": call.id, "content": "46"}]
        return ask(client, messages, **options).choices[0].message.content

    rollout = play(agent, generator)
    assert rollout.error is None and rollout.output == "the sum is 46"
    check_tree(rollout, generator.sampled)
    assert len(rollout.turns) == 3 and not rollout.branches
    assert rollout.metrics["gateway/normalized"] == rollout.metrics["gateway/rewritten"] == 0
    assert rollout.messages[1].tool_calls[0].arguments == {"a": 12, "b": 34} and rollout.messages[1].reasoning == "add them"


def test_retries_branches_edits_sub_agents_and_compaction_become_a_tree() -> None:
    generator = Recorder()

    def agent(task: Any, endpoint: Any) -> None:
        client = connect(endpoint)
        first = [{"role": "user", "content": "Plan."}]
        plan = ask(client, first).choices[0].message.content
        ask(client, first)  # a retry
        talk = [*first, {"role": "assistant", "content": plan}, {"role": "user", "content": "Do it."}]
        done = ask(client, talk).choices[0].message.content
        ask(client, [{"role": "system", "content": "You are a helper."}, {"role": "user", "content": "Look."}])  # a sub-agent
        edited = [*first, {"role": "assistant", "content": plan + "!"}, {"role": "user", "content": "Do it."}]
        ask(client, edited)
        ask(client, [{"role": "user", "content": f"Summary: {done}"}])  # a compaction
        again = [*talk, {"role": "assistant", "content": f"  {done}\n"}, {"role": "user", "content": "Last."}]
        ask(client, again)  # other white space around the reply

    rollout = play(agent, generator)
    assert rollout.error is None
    check_tree(rollout, generator.sampled)
    assert len(rollout.branches) == 4 and len(rollout.policy_turns) == 7
    assert [turn.author for turn in rollout.turns] == ["policy", "environment"] * 2 + ["policy"]
    counted = {name.partition("/")[2]: value for name, value in rollout.metrics.items()}
    assert counted == {
        "requests": 7, "retries": 1, "rewritten": 1, "unmatched": 3, "normalized": 1, "overridden": 0, "refused": 0, "unenforced": 0,
        "throttled": 0, "malformed_calls": 0, "branches": 4,
    }  # fmt: skip


def test_the_responses_api_keeps_conversations_and_calls_tools() -> None:
    generator = Recorder(f"I add.{CALL}", "46", "in all", "streamed")

    def agent(task: Any, endpoint: Any) -> str:
        client = connect(endpoint)
        tools: Any = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}]
        first = client.responses.create(model="m", instructions="Add.", input="12+34?", tools=tools)
        assert first.status == "completed" and [item.type for item in first.output] == ["message", "function_call"]
        call = first.output[1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "46"}
        second = client.responses.create(
            model="m", instructions="Add.", input=[result], previous_response_id=first.id, tools=tools
        )
        items = [{"role": "user", "content": "12+34?"}, *(item.model_dump() for item in first.output), result]
        items += [item.model_dump() for item in second.output]
        third = client.responses.create(
            model="m", instructions="Add.", input=[*items, {"role": "user", "content": "So?"}], tools=tools
        )
        kinds, text = [], ""
        for event in client.responses.create(model="m", input="Stream.", stream=True):
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed" and text == "streamed"
        assert event.response.output_text == text and event.sequence_number == len(kinds) - 1
        with pytest.raises(openai.BadRequestError, match="does not exist in this episode"):
            client.responses.create(model="m", input="x", previous_response_id="resp_1")
        return second.output_text + third.output_text

    rollout = play(agent, generator)
    assert rollout.error is None and rollout.output == "46in all"
    check_tree(rollout, generator.sampled)
    assert len(rollout.branches) == 1 and sum(turn.sampled for turn in rollout.branches[0].turns) == 3


def test_the_functions_of_a_namespace_are_called_by_their_names() -> None:
    generator = Recorder(CALL, "46")

    def agent(task: Any, endpoint: Any) -> str:
        client = connect(endpoint)
        add = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
        tools: Any = [{"type": "namespace", "name": "sums", "description": "Sums.", "tools": [add]}]
        first = client.responses.create(model="m", input="12+34?", tools=tools)
        (call,) = first.output
        assert (call.type, call.name, call.namespace) == ("function_call", "add", "sums")
        items: Any = [{"role": "user", "content": "12+34?"}, call.model_dump(exclude_none=True)]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "46"})
        with pytest.raises(openai.BadRequestError, match=r"tools\[0\].tools\[0\] is of type 'web_search'"):
            client.responses.create(model="m", input="x", tools=[{**tools[0], "tools": [{"type": "web_search"}]}])
        return client.responses.create(model="m", input=items, tools=tools).output_text

    rollout = play(agent, generator)
    assert rollout.error is None and rollout.output == "46" and not rollout.branches
    check_tree(rollout, generator.sampled)


def test_completions_continue_texts_by_their_tokens() -> None:
    generator = Recorder("the in", "12", "x", "y")

    def agent(task: Any, endpoint: Any) -> None:
        client = connect(endpoint)
        first = client.completions.create(model="m", prompt="Say in", max_tokens=8, logprobs=1)
        assert first.choices[0].text == "the in" and len(first.choices[0].logprobs.tokens) == 7
        client.completions.create(model="m", prompt="Say in" + first.choices[0].text + " then")
        client.completions.create(model="m", prompt=[[5, 6, 7], [5, 6, 8]])

    rollout = play(agent, generator)
    assert rollout.error is None
    check_tree(rollout, generator.sampled)
    assert generator.sampled[1][0][: -len(" then") + 2] != generator.sampled[0][0]
    sampled = generator.sampled[0]
    assert generator.sampled[1][0][: len(sampled[0]) + 6] == [*sampled[0], *ids("the in")]  # without the end of the turn


def test_n_choices_are_retries_and_any_of_them_can_be_continued() -> None:
    generator = Recorder()

    def agent(task: Any, endpoint: Any) -> None:
        client = connect(endpoint)
        first = [{"role": "user", "content": "Pick."}]
        answer = ask(client, first, n=3, logprobs=True)
        assert len({choice.message.content for choice in answer.choices}) == 3
        for choice in answer.choices:
            assert [entry.logprob for entry in choice.logprobs.content]
        ask(client, [*first, answer.choices[1].message, {"role": "user", "content": "Why?"}])

    rollout = play(agent, generator)
    check_tree(rollout, generator.sampled)
    assert len(rollout.branches) == 2 and [turn.author for turn in rollout.turns] == ["policy", "environment", "policy"]


def test_the_same_requests_are_sampled_alike_whatever_their_order() -> None:
    questions = ["a", "b", "c", "a"]

    def run(order: list[int]) -> dict[str, list[str]]:
        answers: dict[str, list[str]] = {}

        def agent(task: Any, endpoint: Any) -> None:
            client = connect(endpoint)
            for index in order:
                messages = [{"role": "user", "content": questions[index]}]
                answers.setdefault(questions[index], []).append(ask(client, messages).choices[0].message.content)

        play(agent)
        return answers

    first = run([0, 1, 2, 3])
    assert first == run([3, 2, 0, 1]) and first["a"][0] != first["a"][1]


def test_the_runs_sampling_counts_unless_agents_may_choose() -> None:
    def agent(task: Any, endpoint: Any) -> None:
        ask(connect(endpoint), [{"role": "user", "content": "Hi"}], temperature=0.25, max_tokens=5, stop=["q"])

    generator = Recorder()
    rollout = play(agent, generator)
    (used,) = [request.sampling for request in generator.fake.requests]
    assert (used.temperature, used.max_new_tokens, used.stop_strings) == (1.0, 5, ("q",))
    assert rollout.metrics["gateway/overridden"] == 1
    generator = Recorder()
    rollout = play(agent, generator, gateway={"sampling": "agent"})
    assert generator.fake.requests[0].sampling.temperature == 0.25 and rollout.metrics["gateway/overridden"] == 0


def test_a_conversation_that_does_not_fit_truncates_the_rollout() -> None:
    def agent(task: Any, endpoint: Any) -> None:
        client = connect(endpoint)
        messages: list[Any] = [{"role": "user", "content": "Hi"}]
        while True:
            reply = ask(client, messages).choices[0].message.content
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Go on."}]

    generator = Recorder()
    rollout = play(agent, generator, max_length=150, environment={})
    assert rollout.error is None and rollout.ending is Ending.CONTEXT and rollout.truncated
    assert rollout.rewards == {"score": 0.0} and 1 < len(rollout.policy_turns) < 10 and rollout.length <= 150
    check_tree(rollout, generator.sampled)


def test_errors_are_openais() -> None:
    def agent(task: Any, endpoint: Any) -> float:
        client = connect(endpoint)
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, [{"role": "user", "content": "x" * 3000}])
        assert caught.value.code == "context_length_exceeded" and "policy.max_total_sequence_length" in str(caught.value)
        with pytest.raises(openai.BadRequestError, match="response_format is not supported while a policy is trained"):
            ask(client, [{"role": "user", "content": "x"}], response_format={"type": "json_object"})
        with pytest.raises(openai.AuthenticationError, match="its episode has ended"):
            ask(connect(endpoint, api_key="sk-strop-guess"), [{"role": "user", "content": "x"}])
        assert endpoint.api_key not in repr(endpoint)
        assert client.models.retrieve("anything").id == "anything" and client.models.list().data[0].id == "policy"
        ask(client, [{"role": "user", "content": "x"}])
        return 0.5

    rollout = play(agent, environment={})
    assert rollout.error is None and rollout.reward == 0.5 and rollout.ending is Ending.STOP
    assert rollout.metrics["gateway/refused"] == 2


def test_turns_and_requests_are_limited_and_an_agent_that_then_fails_is_truncated() -> None:
    def agent(task: Any, endpoint: Any) -> None:
        client = connect(endpoint)
        for number in range(5):
            ask(client, [{"role": "user", "content": f"{number}"}])

    rollout = play(agent, max_turns=2)
    assert rollout.ending is Ending.TURNS and rollout.error is None and len(rollout.policy_turns) == 2
    rollout = play(agent, gateway={"max_requests": 3})
    assert "gateway.max_requests allows" in str(rollout.error)


def test_a_key_dies_with_its_episode_and_a_body_has_a_limit() -> None:
    kept: list[Any] = []

    def agent(task: Any, endpoint: Any) -> None:
        client = connect(endpoint)
        with pytest.raises(openai.APIStatusError) as caught:
            ask(client, [{"role": "user", "content": "x" * 300_000}])
        assert caught.value.status_code == 413
        if kept:
            with pytest.raises(openai.AuthenticationError):
                ask(connect(endpoint, api_key=kept[0].api_key), [{"role": "user", "content": "x"}])
        ask(client, [{"role": "user", "content": "x"}])
        kept.append(endpoint)

    for _ in range(2):
        assert play(agent, gateway={"max_body_mb": 0.1}).error is None
    assert kept[0].api_key != kept[1].api_key
    with pytest.raises(openai.APIConnectionError):
        ask(connect(kept[1]), [{"role": "user", "content": "x"}])


def test_an_agent_without_a_completion_and_one_that_crashes_are_errors() -> None:
    assert "ended on task 't1' without a completion" in str(play(lambda task, endpoint: 1.0).error)

    def crash(task: Any, endpoint: Any) -> None:
        ask(connect(endpoint), [{"role": "user", "content": "x"}])
        raise LookupError("lost")

    assert play(crash).error == "LookupError: lost"


def test_an_error_of_the_engine_is_the_rollouts_error() -> None:
    class Broken(Recorder):
        async def generate(self, prompt: Any, **options: Any) -> Any:
            raise RuntimeError("the engine is gone")

    def agent(task: Any, endpoint: Any) -> float:
        with pytest.raises(openai.InternalServerError, match="its log says why"):
            ask(connect(endpoint), [{"role": "user", "content": "x"}])
        return 1.0

    assert play(agent, Broken()).error == "RuntimeError: the engine is gone"


def test_what_a_request_waits_for_is_inside_its_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        with waiting("generation", on="group 7"):
            session = make_session(Recorder("yes"))
            asked = session.read({"messages": [{"role": "user", "content": "Hi"}]}, is_chat=True)
            await asyncio.create_task(session.complete(*asked), context=Context())  # as from a connection

    parents: list[Any] = []
    heard = [lambda wait: parents.append((wait.on, wait.parent and wait.parent.on))]
    monkeypatch.setattr("strop.monitoring.waits.wait_listeners", heard)
    asyncio.run(ask())
    assert parents[0] == ("engine, request 0", "group 7")


def test_a_request_sets_variables_of_the_chat_template_and_continues_only_what_was_read_with_them() -> None:
    template = ChatTemplate(tiny_tokenizer(template=TOOL_CHATML + "{% if terse %}short{% endif %}"))
    session = replace(make_session(Recorder("yes")), template=template)
    body = {"messages": [{"role": "user", "content": "a"}]}

    async def ask() -> tuple[list[int], list[int], list[int]]:
        asked, encoded = session.read({**body, "chat_template_kwargs": {"terse": True}}, is_chat=True)
        await session.complete(asked, encoded)
        later = {"messages": [*body["messages"], {"role": "assistant", "content": "yes"}, {"role": "user", "content": "b"}]}
        (_, same), (_, other) = (
            session.read({**later, "chat_template_kwargs": {"terse": on}}, is_chat=True) for on in (True, False)
        )
        assert same is not None and other is not None and same.parent is not None and other.parent is None
        return list(asked.prompts[0]), same.tokens, other.tokens

    first, same, other = asyncio.run(ask())
    assert template.tokenizer.decode(first).endswith("short") and same[: len(first)] == first
    assert "short" not in template.tokenizer.decode(other)
    with pytest.raises(BadRequest, match="must be an object"):
        session.read({**body, "chat_template_kwargs": [1]}, is_chat=True)
