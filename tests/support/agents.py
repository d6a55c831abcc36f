"""Episodes of agents against the real gateway, with a generator that is a script or random letters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import torch

from loop.fakes import FakeGenerator
from loop.tiny import tiny_tokenizer
from strop.base_config import validate_section
from strop.environments.base import PromptedTask
from strop.environments.handle import LocalEnvironment
from strop.environments.resources import configure_resources
from strop.extensions.agents.external_agent import ExternalAgent
from strop.extensions.agents.gateway.agent_session import AgentSession, SessionOptions
from strop.extensions.agents.gateway.gateway_config import GatewayConfig
from strop.generation.base import Completion
from strop.models.chat_template import ChatTemplate
from strop.rollouts.episode import EpisodeRules, run_episode
from strop.sampling import Sampling
from strop.types import Rollout, Turn, user

TOOL_CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER = tiny_tokenizer(template=TOOL_CHATML)
TEMPLATE = ChatTemplate(TOKENIZER)
END = TOKENIZER.eos_token_id
TASK = PromptedTask(id="t1", question="What is 1+2?", answer="3", messages=(user("What is 1+2?"),), metadata={"level": 1})
SEED = 11


def ids(text: str) -> list[int]:
    """Return one token for each character, which is seldom how the tokenizer writes it."""
    found: list[int] = TOKENIZER.convert_tokens_to_ids(list(text))
    return found


class Recorder:
    """A generator that says texts in order, character by character, or random letters; it keeps what it sampled."""

    def __init__(self, *texts: str, cut: bool = False) -> None:
        self.fake = FakeGenerator(TOKENIZER, (lambda request: self._say()) if texts else None)
        self.texts = list(texts)
        self.cut = cut  # by the limit of tokens
        self.sampled: list[tuple[list[int], Completion]] = []
        self.version = 0

    def _say(self) -> tuple[list[int], bool]:
        text = self.texts.pop(0)
        return [*ids(text), *([] if self.cut else [END])], not self.cut

    async def generate(self, prompt: Sequence[int], **options: Any) -> Completion:
        completion = await self.fake.generate(prompt, **options)
        self.sampled.append((list(prompt), completion))
        return completion

    async def close(self) -> None: ...


async def play_async(
    agent: Any, generator: Any = None, *, environment: Any = None, gateway: dict[str, Any] | None = None, **rules: Any
) -> Rollout:
    options = {"reward": lambda task, rollout: 0.0} if environment is None else environment
    if agent is not None:
        options = {"agent": agent, **options}
    configure_resources({"gateway": validate_section(GatewayConfig, gateway or {})})
    return await run_episode(
        LocalEnvironment(ExternalAgent(**options)),
        TASK,
        0,
        SEED,
        generator=generator or Recorder(),
        template=TEMPLATE,
        sampling=Sampling(max_new_tokens=rules.pop("max_new_tokens", 128)),
        rules=EpisodeRules(**{"max_turns": 64, "max_length": 2000, **rules}),
    )


def play(agent: Callable[..., Any] | None, generator: Any = None, **options: Any) -> Rollout:
    """Run an episode."""
    return asyncio.run(play_async(agent, generator, **options))


EMPTY_ROLLOUT = Rollout(task=TASK, sample=0, seed=SEED, messages=(), prompt=torch.zeros(0, dtype=torch.int64))


def make_session(generator: Any, **limits: int) -> AgentSession:
    """Return a session without a server."""
    options = SessionOptions(
        seed=SEED, sample=0, sampling=Sampling(max_new_tokens=16), **{"max_turns": 1000, "max_length": 4000, **limits}
    )
    return AgentSession(options=options, generator=generator, template=TEMPLATE, config=validate_section(GatewayConfig, {}))


def check_tree(rollout: Rollout, sampled: Sequence[tuple[list[int], Completion]]) -> None:
    """Check that the tree has each completion exactly once, after exactly the tokens that the engine read."""
    found = list_contexts(rollout)
    assert len(found) == len(sampled)
    wanted = {(tuple(prompt), id(completion.tokens)) for prompt, completion in sampled}
    assert {(context, id(turn.tokens)) for context, turn in found} == wanted
    for turn in (turn for _, turn in found):
        assert (turn.versions >= 0).all() and len(turn.logprobs) == len(turn.tokens)
    for turns in (rollout.turns, *(branch.turns for branch in rollout.branches)):
        assert all((turn.versions == -1).all() and not turn.logprobs.any() for turn in turns if not turn.sampled)


def list_contexts(rollout: Rollout) -> list[tuple[tuple[int, ...], Turn]]:
    """Return the tokens before each turn of the policy, and the turn."""
    paths: list[list[int]] = []
    found: list[tuple[tuple[int, ...], Turn]] = []
    roots = [(rollout.prompt.tolist(), rollout.turns)]
    for number, (begin, turns) in enumerate(roots + [(None, branch.turns) for branch in rollout.branches]):
        if begin is None:
            branch = rollout.branches[number - 1]
            assert 0 <= branch.parent < number and branch.start <= len(paths[branch.parent])
            begin = paths[branch.parent][: branch.start]
        tokens = list(begin)
        for turn in turns:
            if turn.sampled:
                found.append((tuple(tokens), turn))
            tokens += turn.tokens.tolist()
        paths.append(tokens)
    return found
