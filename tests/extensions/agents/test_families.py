"""Tools and reasoning through the gateway with the real ``openai`` client, for each family's chat template and format of calls."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from loop.fakes import FakeGenerator
from strop.environments.handle import LocalEnvironment
from strop.extensions.agents.external_agent import ExternalAgent
from strop.rollouts.episode import EpisodeRules, run_episode
from strop.sampling import Sampling
from strop.types import Rollout, ToolCall
from support.agents import SEED, TASK, Recorder, check_tree
from support.tool_families import TOOL_FAMILIES, ToolFamily

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]
CALL = ToolCall("add", {"a": 12, "b": 34}, id="abcdefgh1")


def tokenize(family: ToolFamily, tokenizer: Any, texts: list[str]) -> Any:
    """A policy that says the texts, cut into tokens in another way than the tokenizer does."""
    queue = list(texts)

    def say(request: Any) -> tuple[list[int], bool]:
        text = queue.pop(0)
        half = len(text) // 2 - 3
        while any(
            text[half - shift : half - shift + len(mark)] == mark for mark in family.specials for shift in range(1, len(mark))
        ):
            half += 1  # special tokens stay whole
        return [
            token for part in (text[:half], text[half:]) for token in tokenizer(part, add_special_tokens=False)["input_ids"]
        ], True

    return FakeGenerator(tokenizer, say)


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_conversations_with_tools_and_reasoning_are_stored_as_they_were_sampled(name: str) -> None:
    pytest.importorskip("trl")
    family = TOOL_FAMILIES[name]
    template = family.make_template()
    texts = [family.write([CALL], reasoning="add them"), family.write([], "It is 46.", "done"), family.write([], "Yes.", "sure")]
    generator = Recorder()
    generator.fake = tokenize(family, template.tokenizer, texts)
    seen: list[Any] = []

    def agent(task: Any, endpoint: Any) -> str:
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "12+34?"}]
        for follow in ([{"role": "tool", "content": "46"}], [{"role": "user", "content": "Sure?"}], []):
            reply = client.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0].message
            seen.append(reply)
            messages.append(reply)
            calls = [{**follow[0], "tool_call_id": call.id} for call in reply.tool_calls or []]
            messages += calls or follow
        return messages[-1].content

    rollout: Rollout = asyncio.run(
        run_episode(
            LocalEnvironment(ExternalAgent(agent=agent, reward=lambda task, rollout: 1.0)), TASK, 0, SEED,
            generator=generator, template=template,
            sampling=Sampling(max_new_tokens=200), rules=EpisodeRules(max_turns=3, max_length=4000),
        )
    )  # fmt: skip
    assert rollout.error is None
    check_tree(rollout, generator.sampled)
    assert not rollout.branches and [turn.sampled for turn in rollout.turns] == [True, False, True, False, True]
    (call,) = seen[0].tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 12, "b": 34}
    assert [reply.content for reply in seen[1:]] == ["It is 46.", "Yes."] and rollout.output == "Yes."
    if family.reasoning:
        assert [reply.reasoning_content for reply in seen] == ["add them", "done", "sure"]
    assert (
        rollout.metrics["gateway/normalized"]
        == rollout.metrics["gateway/rewritten"]
        == rollout.metrics["gateway/malformed_calls"]
        == 0
    )
    observed = [template.tokenizer.decode(turn.tokens.tolist()) for turn in rollout.turns if not turn.sampled]
    assert "46" in observed[0] and "Sure?" in observed[1]
