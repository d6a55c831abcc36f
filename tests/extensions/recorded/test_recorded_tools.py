"""Recorded conversations with calls of tools: what is in the loss, and what the template shows."""

from __future__ import annotations

from typing import Any

import pytest

from strop.data.sources.source import DataSource
from strop.extensions.recorded.examples import conversations, preferences
from strop.extensions.recorded.recorded_tokens import RecordedRules
from strop.models.chat_template import ChatTemplate
from strop.types import Rollout
from support.recorded import demonstration_group, preference_group
from support.tokenizer import build_tokenizer
from support.tool_families import TOOL_FAMILIES

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "aaaaaaaa1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "aaaaaaaa1", "name": "add"},
    {"role": "assistant", "content": "It is 3"},
]
RULES = RecordedRules(max_length=10_000)


def read(template: ChatTemplate, *rows: dict[str, Any], **source: Any) -> Rollout:
    example = conversations(DataSource(rows=rows, **source))[0]
    return demonstration_group(0, "sft", example, template, RULES).rollouts[0]


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3_instruct", "llama3.1", "llama3.2", "mistral"])
def test_calls_are_in_the_loss_and_results_are_not(name: str) -> None:
    family = TOOL_FAMILIES[name]
    template = family.make_template()
    rollout = read(template, {"messages": TALK, "tools": [TOOL]})
    assert rollout.error is None, rollout.error
    decode = template.tokenizer.decode
    spoken = [decode(turn.tokens) for turn in rollout.policy_turns]
    assert len(spoken) == 2 and spoken[1] == f"It is 3{family.end}"
    assert '"add"' in spoken[0] and spoken[0].endswith(family.end) and "3" not in spoken[0].replace("aaaaaaaa1", "")
    heard = [decode(turn.tokens) for turn in rollout.turns if not turn.sampled]
    assert len(heard) == 1 and "3" in heard[0]
    assert "Add." in decode(rollout.prompt)
    messages = conversations(DataSource(rows=[{"messages": TALK}]))[0].messages
    whole = template.encode_conversation(messages, tools=[TOOL])
    assert whole[: rollout.length] == rollout.tokens().tolist()


def test_what_was_recorded_has_the_tokens_of_what_would_be_sampled() -> None:
    family = TOOL_FAMILIES["qwen2.5"]
    template = family.make_template()
    rollout = read(template, {"messages": TALK, "tools": [TOOL]})
    first, result, _ = rollout.turns
    calls = rollout.messages[1].tool_calls
    assert first.tokens.tolist() == template.tokenizer(family.write(calls), add_special_tokens=False)["input_ids"]
    assert result.tokens.tolist() == template.encode_observation(rollout.messages[2:3], first.tokens.tolist(), calls=calls)


def test_reasoning_is_in_the_loss_where_the_template_writes_it() -> None:
    template = TOOL_FAMILIES["qwen3"].make_template()
    talk = [TALK[0], {"role": "assistant", "reasoning_content": "hm", "content": "3"}]
    rollout = read(template, {"messages": talk})
    assert template.tokenizer.decode(rollout.policy_turns[0].tokens) == "<think>\nhm\n</think>\n\n3<|im_end|>"


def test_definitions_stand_in_a_column_of_another_name_or_as_json() -> None:
    template = TOOL_FAMILIES["qwen2.5"].make_template()
    plain = read(template, {"messages": TALK, "tools": [TOOL]})
    for row, source in (
        ({"messages": TALK, "functions": [TOOL["function"]]}, {"tool_key": "functions"}),
        (
            {
                "messages": TALK,
                "tools": '[{"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}]',
            },
            {},
        ),
    ):
        assert read(template, row, **source).tokens().tolist() == plain.tokens().tolist()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": TALK}, "writes no tool calls"),
        ({"messages": [TALK[0], {"role": "assistant", "content": "3", "reasoning": "hm"}]}, "writes no reasoning"),
        ({"messages": [TALK[0], TALK[3]], "tools": [TOOL]}, "definitions of tools, which the chat template does not show"),
    ],
)
def test_a_template_without_a_place_for_it_makes_the_example_an_error(row: dict[str, Any], said: str) -> None:
    error = read(ChatTemplate(build_tokenizer()), row).error
    assert error is not None and said in error


def test_preferences_may_call_tools_too() -> None:
    template = TOOL_FAMILIES["qwen2.5"].make_template()
    row = {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": [{"role": "assistant", "content": "4"}], "tools": [TOOL]}
    example = preferences(DataSource(rows=[row]))[0]
    chosen, rejected = preference_group(0, "dpo", example, template, RULES).rollouts
    assert chosen.error is None and chosen.prompt is rejected.prompt and len(chosen.policy_turns) == 2
    assert "Add." in template.tokenizer.decode(chosen.prompt)
