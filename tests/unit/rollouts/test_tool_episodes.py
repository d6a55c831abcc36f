"""Episodes with tools: in this process and in others, in turns and inside of one message, with the prefix kept by the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from loop.tiny import tiny_model
from strop.data.sources.source import DataSource
from strop.environments.base import Environment, reward
from strop.environments.handle import LocalEnvironment
from strop.environments.registry import make_environment
from strop.environments.remote import EnvironmentDescription, connect
from strop.generation.base import Completion
from strop.models.chat_template import ChatTemplate
from strop.models.network import Network
from strop.rollouts.episode import EpisodeRules, run_episode
from strop.rollouts.policy_turns import describe_tool_calls
from strop.sampling import Sampling
from strop.tools.base import ToolConfigError
from strop.types import Ending, Message, Messages, Rollout, Task, user
from support.environment_servers import EnvironmentServerThread, handle_of
from support.tokenizer import build_tokenizer
from support.tool_families import TOOL_FAMILIES
from support.torch_engine import make_engine, make_runner

DATA = DataSource(size=4)
MINE = '''
def twice(number: int) -> int:
    """Double a number."""
    return 2 * number
'''
CALL = '<tool_call>\n{"name": "twice", "arguments": {"number": 21}}\n</tool_call>'


def twice(number: int) -> int:
    """Double a number."""
    return 2 * number


class Scripted:
    """Samples the texts of a script; stops where a stop string does."""

    version = 0

    def __init__(self, tokenizer: Any, script: Sequence[str]) -> None:
        self.tokenizer, self.script, self.prompts, self.stops = tokenizer, [*script], list[list[int]](), list[tuple[str, ...]]()

    async def generate(self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "") -> Completion:
        tokens = self.tokenizer(self.script[len(self.prompts) % len(self.script)], add_special_tokens=False)["input_ids"]
        self.prompts.append(list(prompt))
        self.stops.append(sampling.stop_strings)
        length = len(tokens)
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        ids = torch.tensor(tokens)
        return Completion(tokens=ids, logprobs=torch.zeros(length), versions=torch.zeros(length).int(), text=text, stopped=True)

    async def close(self) -> None: ...


def run(environment: Environment[Any], template: ChatTemplate, engine: Any, turns: int = 4, **rules: Any) -> Rollout:
    task = environment.tasks(DATA)[0]
    limits = EpisodeRules(max_turns=turns, max_length=4000, **rules)
    sampling = Sampling(max_new_tokens=24)
    return asyncio.run(
        run_episode(handle_of(environment), task, 0, 1, generator=engine, template=template, sampling=sampling, rules=limits)
    )


@pytest.fixture
def mine(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return f"{file}:twice"


QWEN = TOOL_FAMILIES["qwen2.5"].make_template()


def test_a_remote_environment_calls_its_tools_in_its_own_process(mine: str) -> None:
    options = {"tools": [mine], "max_tool_calls": 1, "tool_continuation": "turn"}
    served = EnvironmentServerThread(EnvironmentDescription(alias="sums", name="arithmetic", options=options, sources=(DATA,)))
    remote = connect(served.description, [served.transport])
    assert remote.traits.tool_continuation == "turn" and remote.traits.responds
    script = [f"{CALL}<|im_end|>", f"{CALL}<|im_end|>", "<tool_call>hm</tool_call><|im_end|>", "42<|im_end|>"]
    there = run(remote, QWEN, Scripted(QWEN.tokenizer, script))
    here = run(make_environment("arithmetic", options), QWEN, Scripted(QWEN.tokenizer, script))
    assert there.error is None and here.error is None
    assert there.tokens().tolist() == here.tokens().tolist() and there.messages == here.messages
    assert there.metrics == here.metrics == {"tool_calls": 2.0, "tool_errors": 1.0, "malformed_tool_calls": 1.0}
    assert served.calls.count("answer_calls") == 3 and there.ending is Ending.STOP


def test_the_messages_of_a_rollout_have_calls_and_results() -> None:
    rollout = run(
        make_environment("arithmetic", {"tools": [twice]}), QWEN, Scripted(QWEN.tokenizer, [f"{CALL}<|im_end|>", "42<|im_end|>"])
    )
    asked, told, final = rollout.messages[-3:]
    assert [(call.name, call.arguments, call.id) for call in asked.tool_calls] == [("twice", {"number": 21}, "c00000000")]
    assert told == Message("tool", "42", name="twice", tool_call_id="c00000000")
    assert final.content == "42" and rollout.text == "42"


def test_without_calls_there_are_metrics_too_and_a_call_that_is_cut_off_is_not_run() -> None:
    environment = make_environment("arithmetic", {"tools": [twice]})
    assert run(environment, QWEN, Scripted(QWEN.tokenizer, ["42<|im_end|>"])).metrics["tool_calls"] == 0.0
    tight = run(environment, QWEN, Scripted(QWEN.tokenizer, [f"{CALL}<|im_end|>"]), turns=2)
    assert tight.ending is Ending.TURNS and len(tight.policy_turns) == 2


def test_an_episode_ends_at_the_limit_where_it_should() -> None:
    options = {"tools": [twice], "max_tool_calls": 1, "at_tool_limit": "end"}
    rollout = run(make_environment("arithmetic", options), QWEN, Scripted(QWEN.tokenizer, [f"{CALL}<|im_end|>"]))
    assert rollout.ending is Ending.TOOL_CALLS and rollout.error is None and len(rollout.policy_turns) == 2


def test_the_same_message_goes_on_after_a_result() -> None:
    environment = make_environment("arithmetic", {"tools": [twice], "tool_continuation": "message"})
    engine = Scripted(QWEN.tokenizer, [f"I ask. {CALL}", " So 42<|im_end|>"])
    rollout = run(environment, QWEN, engine)
    assert rollout.error is None and engine.stops == [("</tool_call>",)] * 2
    text = QWEN.tokenizer.decode(rollout.tokens())
    assert text.endswith(f"I ask. {CALL}\n<tool_response>\n42\n</tool_response>\n So 42<|im_end|>")
    assert rollout.turns[1].text == "42" and not rollout.turns[1].sampled


def test_a_format_that_ends_the_message_cannot_go_on_in_it() -> None:
    environment = make_environment("arithmetic", {"tools": [twice], "tool_continuation": "message"})
    with pytest.raises(ToolConfigError, match="tool_continuation is message, but calls in the format llama3_json end a message"):
        describe_tool_calls([LocalEnvironment(environment)], TOOL_FAMILIES["llama3.1"].make_template(), None)


def test_how_tools_are_called_is_said_when_a_run_starts() -> None:
    environment = make_environment("arithmetic", {"tools": [twice]})
    assert describe_tool_calls([LocalEnvironment(make_environment("arithmetic", {}))], QWEN, None) is None
    assert (
        describe_tool_calls([LocalEnvironment(environment)], QWEN, None)
        == "tool calls in the format hermes (as the chat template writes them)"
    )
    plain = ChatTemplate(build_tokenizer())
    with pytest.raises(ToolConfigError, match=r"set policy\.tokenizer\.tool_call_format"):
        describe_tool_calls([LocalEnvironment(environment)], plain, None)
    with pytest.raises(ToolConfigError, match="did you mean 'hermes'"):
        describe_tool_calls([LocalEnvironment(environment)], plain, "herms")
    said = describe_tool_calls([LocalEnvironment(environment)], plain, "xml")
    assert said is not None and "a system message describes the tools" in said


def test_a_template_without_tools_shows_them_in_a_system_message() -> None:
    plain = ChatTemplate(build_tokenizer())
    call = "<tool_call><name>twice</name><arguments><number>21</number></arguments></tool_call>"
    rollout = run(
        make_environment("arithmetic", {"tools": [twice]}),
        plain,
        Scripted(plain.tokenizer, [f"{call}<|im_end|>", "42<|im_end|>"]),
        tool_call_format="xml",
    )
    assert rollout.error is None and rollout.messages[0].role == "system"
    assert '"name": "twice"' in rollout.messages[0].content and "<name>twice</name>" in rollout.messages[0].content
    assert plain.tokenizer.decode(rollout.turns[1].tokens) == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_without_system_and_tool_messages_gets_them_as_the_users() -> None:
    """Gemma's: turns of the user and of the model alternate, and there is nothing else."""
    family = replace(
        TOOL_FAMILIES["qwen2.5"], template="gemma.jinja", end="<end_of_turn>", specials=("<start_of_turn>", "<end_of_turn>")
    )
    template = family.make_template()
    engine = Scripted(template.tokenizer, [f"{CALL}<end_of_turn>", "42<end_of_turn>"])
    rollout = run(make_environment("arithmetic", {"tools": [twice]}), template, engine, tool_call_format="hermes")
    assert rollout.error is None and rollout.messages[0].role == "user" and "twice" in rollout.messages[0].content
    told = template.tokenizer.decode(rollout.turns[1].tokens)
    assert told == "\n<start_of_turn>user\n42<end_of_turn>\n<start_of_turn>model\n"


@dataclass(frozen=True, kw_only=True)
class AlwaysCalls(Environment[Task]):
    """An environment of a model that writes noise: whatever it writes is followed by a result."""

    def tasks(self, data: DataSource) -> Sequence[Task]:
        return [Task(id="t")]

    def prompt(self, task: Task) -> Messages:
        return (user("What is 12 plus 7?"),)

    @reward()
    def none(self, task: Task, rollout: Rollout) -> float:
        return 0.0


@pytest.mark.parametrize("continuation", ["turn", "message"])
def test_the_prefix_of_a_conversation_is_not_computed_again(continuation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn reads what was appended and the last token that was sampled, and nothing before it."""
    from strop.rollouts.policy_turns import ToolTurns
    from strop.tools.base import ParsedReply
    from strop.types import ToolCall

    template = TOOL_FAMILIES["qwen2.5"].make_template()
    network = Network(tiny_model(len(template.tokenizer)), chunk=64)
    engine = make_engine(make_runner(network, slots=2, length=2048, prefix_tokens=4096), template.tokenizer)

    def parse(self: ToolTurns, turn: Any, number: int) -> ParsedReply:
        return ParsedReply("", calls=(ToolCall("twice", {"number": number}, "c00000000"),) if number < 3 else ())

    async def generate(self: Any, *arguments: Any, **options: Any) -> Completion:
        completion = await original(self, *arguments, **options)
        read.append(engine.counters.prompt_tokens)
        return Completion(**{**vars(completion), "stopped": True})

    read: list[int] = []
    original = type(engine).generate
    monkeypatch.setattr(ToolTurns, "parse", parse)
    monkeypatch.setattr(type(engine), "generate", generate)
    rollout = run(AlwaysCalls(tools=[twice], tool_continuation=continuation), template, engine)
    assert rollout.error is None and len(rollout.policy_turns) == 4
    appended = [len(turn.tokens) for turn in rollout.turns if not turn.sampled]
    assert read[0] == len(rollout.prompt)
    assert [after - before for before, after in pairwise(read)] == [length + 1 for length in appended]
