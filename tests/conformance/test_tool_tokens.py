"""Token in, token out, with tools: what is stored is what was sampled, and the rest is what the family's template writes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from strop.data.sources.source import DataSource
from strop.environments.base import Environment, reward
from strop.environments.handle import LocalEnvironment
from strop.generation.base import Completion
from strop.models.chat_template import ChatTemplate, ConversationError
from strop.rollouts.episode import EpisodeRules, run_episode
from strop.rollouts.policy_turns import find_format
from strop.sampling import Sampling
from strop.tools.tool_options import make_tool
from strop.types import Ending, Messages, Rollout, Task, ToolCall, user
from support.tool_families import TOOL_FAMILIES, ToolFamily

TASK = Task(id="t")


def add(a: int, b: int = 0) -> int:
    """Add two numbers."""
    return a + b


@dataclass(frozen=True, kw_only=True)
class Sums(Environment[Task]):
    def tasks(self, data: DataSource) -> Sequence[Task]:
        return [TASK]

    def prompt(self, task: Task) -> Messages:
        return (user("What is 1 + 2 + 3?"),)

    @reward()
    def right(self, task: Task, rollout: Rollout) -> bool:
        return rollout.text.strip().endswith("6")


class Scripted:
    """Samples the tokens of a script, a list for each turn."""

    version = 0

    def __init__(self, tokenizer: Any, script: Sequence[Sequence[int]]) -> None:
        self.tokenizer, self.script, self.prompts = tokenizer, script, list[list[int]]()

    async def generate(self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "") -> Completion:
        tokens = torch.tensor(self.script[len(self.prompts)], dtype=torch.int64)
        self.prompts.append(list(prompt))
        return Completion(
            tokens=tokens,
            logprobs=-torch.arange(1.0, len(tokens) + 1),
            versions=torch.full((len(tokens),), 7, dtype=torch.int32),
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            stopped=True,
        )

    async def close(self) -> None: ...


def script_of(family: ToolFamily, thinks: bool = True) -> list[str]:
    """Return two turns with calls, of which the second has two where the family writes several, and an answer."""
    first = [ToolCall("add", {"a": 1, "b": 2}, id="aaaaaaaa1")]
    second = [ToolCall("add", {"a": 3, "b": 3}, id="aaaaaaaa2"), ToolCall("add", {"a": 6}, id="aaaaaaaa3")][: 1 + family.several]
    thought = ("I add.", "Once more.", "Done.") if thinks else ("", "", "")
    return [family.write(first, "", thought[0]), family.write(second, "", thought[1]), family.write([], "It is 6", thought[2])]


def run(template: ChatTemplate, script: Sequence[Sequence[int]], **options: Any) -> tuple[Rollout, Scripted]:
    engine = Scripted(template.tokenizer, script)
    rules = EpisodeRules(max_turns=len(script), max_length=100_000)
    rollout = asyncio.run(
        run_episode(
            LocalEnvironment(Sums(tools=[add], **options)),
            TASK,
            0,
            0,
            generator=engine,
            template=template,
            sampling=Sampling(),
            rules=rules,
        )
    )
    assert rollout.error is None, rollout.error
    return rollout, engine


def check_turns(rollout: Rollout, engine: Scripted) -> None:
    """Check that the policy's turns are what was sampled, that nothing else is in the loss, and that the engine read what is stored."""
    assert [turn.tokens.tolist() for turn in rollout.policy_turns] == [list(tokens) for tokens in engine.script]
    assert [turn.author for turn in rollout.turns] == ["policy", "environment"] * (len(engine.script) - 1) + ["policy"]
    for turn in rollout.turns:
        length = len(turn.tokens)
        assert turn.logprobs.tolist() == ([-float(place) for place in range(1, length + 1)] if turn.sampled else [0.0] * length)
        assert turn.versions.tolist() == [7 if turn.sampled else -1] * length
    read = rollout.prompt.tolist()
    for turn in rollout.turns:
        if turn.sampled:
            assert engine.prompts.pop(0) == read
        read = read + turn.tokens.tolist()


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_stored_tokens_are_sampled_tokens_however_the_policy_cuts_its_text(name: str) -> None:
    """The policy samples every byte as a token of its own, which no tokenizer would."""
    family = TOOL_FAMILIES[name]
    template = family.make_template()
    encode = template.tokenizer
    specials = sorted({*encode.all_special_tokens}, key=len, reverse=True)

    def cut(text: str) -> list[int]:
        ids: list[int] = []
        while text:
            piece = next((each for each in specials if text.startswith(each)), text[0])
            ids += encode(piece, add_special_tokens=False)["input_ids"]
            text = text[len(piece) :]
        return ids

    script = [cut(text) for text in script_of(family)]
    rollout, engine = run(template, script)
    check_turns(rollout, engine)
    assert rollout.ending is Ending.STOP and rollout.reward == 1.0
    assert rollout.metrics == {"tool_calls": 3.0 if family.several else 2.0, "tool_errors": 0.0, "malformed_tool_calls": 0.0}


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_the_whole_sequence_is_what_the_template_writes_where_it_rewrites_nothing(name: str) -> None:
    family = TOOL_FAMILIES[name]
    template = family.make_template()
    script = [template.tokenizer(text, add_special_tokens=False)["input_ids"] for text in script_of(family)]
    rollout, engine = run(template, script)
    check_turns(rollout, engine)
    messages = rollout.messages
    if family.format == "deepseek":  # its templates have no place for reasoning
        with pytest.raises(ConversationError, match="writes no reasoning"):
            template.encode_conversation(messages)
        messages = tuple(replace(message, reasoning="") for message in messages)
    tools = [tool.schema for tool in _tools()] if template.describes_tools else []
    whole = template.encode_conversation(messages, tools=tools)
    written, stored = template.tokenizer.decode(whole), template.tokenizer.decode(rollout.tokens())
    if family.rewrites:
        assert not written.startswith(stored), f"this is no longer so: {family.rewrites}"
        return
    assert written.startswith(stored)
    assert whole[: rollout.length] == rollout.tokens().tolist()


def _tools() -> Sequence[Any]:
    return [make_tool(add)]


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_the_format_is_found_by_what_the_template_writes(name: str) -> None:
    family = TOOL_FAMILIES[name]
    assert find_format(family.make_template(), None).name == family.format


BROKEN = {
    "hermes": "<tool_call>\n{'name': add}\n</tool_call>",
    "qwen_xml": "<tool_call>\nadd\n</tool_call>",
    "llama3_json": '{"name": "add", "parameters": {',
    "mistral": "[TOOL_CALLS][{]",
    "gpt_oss": " to=functions.add<|channel|>commentary json<|message|>{",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_a_malformed_call_is_told_in_the_familys_own_words_and_counted(name: str) -> None:
    family = TOOL_FAMILIES[name]
    template = family.make_template()
    begin = family.reasoning.format("Hm.") if family.reasoning else ""
    texts = [begin + BROKEN[family.format] + (family.call_end or family.end), *script_of(family)[1:]]
    script = [template.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    rollout, engine = run(template, script)
    check_turns(rollout, engine)
    assert rollout.metrics["malformed_tool_calls"] == 1.0
    told = rollout.turns[1]
    assert "could not be read" in told.text and told.text in template.tokenizer.decode(told.tokens).replace('\\"', '"')
