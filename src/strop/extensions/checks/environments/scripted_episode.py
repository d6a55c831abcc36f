"""Episodes without a model: the policy writes texts that were given, one in each turn, the last of them in all that follow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from strop.endings import Ending
from strop.environments.base import Environment
from strop.environments.handle import LocalEnvironment
from strop.environments.policy_client import serve_policy
from strop.environments.rewards import RewardResult
from strop.safety.exits import contain_exits
from strop.types import Messages, Rollout, Task, Turn, assistant, observation_turn
from strop.user_code import describe_error

CHARACTERS_PER_TOKEN = 4
LIMIT_S = 60.0  # of an episode

Script = str | Sequence[str]  # what the policy writes in every turn, or in each


@dataclass(frozen=True)
class PlayedEpisode:
    """What an environment did with a text."""

    rollout: Rollout
    script: Script
    responses: tuple[tuple[tuple[str, str], ...] | None, ...] = ()  # role and content after each turn; None: it ended
    result: RewardResult | None = None
    accuracy: float = 0.0
    error: str | None = None

    @property
    def reward(self) -> float:
        return 0.0 if self.result is None else self.result.reward


def make_turn(text: str) -> Turn:
    """Return a turn of the policy with as many tokens as a tokenizer would make of the text, roughly."""
    length = -(-len(text) // CHARACTERS_PER_TOKEN) + 1  # and the end of the turn
    return Turn(
        author="policy",
        tokens=torch.arange(length),
        text=text,
        logprobs=torch.zeros(length),
        versions=torch.zeros(length, dtype=torch.int32),
    )


async def play(environment: Environment[Any], task: Task, script: Script, *, max_turns: int, sample: int = 0) -> PlayedEpisode:
    """Play one episode, its rewards included. An error is returned, not raised."""
    rollout = Rollout(task=task, sample=sample, seed=sample, messages=(), prompt=torch.zeros(1, dtype=torch.int64))
    texts = (script,) if isinstance(script, str) else tuple(script)
    episode = _Episode(LocalEnvironment(environment), rollout, texts, max_turns)
    try:
        with contain_exits(), serve_policy(_SamePolicy(texts[-1])):
            return await asyncio.wait_for(episode.run(), LIMIT_S)
    except Exception as error:
        late = isinstance(error, TimeoutError) and not str(error)
        said = f"the episode did not end within {LIMIT_S:g} s" if late else describe_error(error)
        return PlayedEpisode(episode.rollout, script, tuple(episode.responses), error=said)


@dataclass(frozen=True)
class _SamePolicy:
    """The policy as an opponent of itself: it writes the same text."""

    text: str
    version: int = 0

    def past(self, share: float) -> _SamePolicy:
        return self

    async def complete(self, messages: Messages, *, seed: int, stop_strings: Sequence[str] = ()) -> str:
        return self.text


class _Episode:
    def __init__(self, environment: LocalEnvironment[Any], rollout: Rollout, texts: tuple[str, ...], max_turns: int) -> None:
        self.environment, self.rollout, self.texts, self.max_turns = environment, rollout, texts, max_turns
        self.responses: list[tuple[tuple[str, str], ...] | None] = []

    async def run(self) -> PlayedEpisode:
        environment, task = self.environment, self.rollout.task
        played: PlayedEpisode | None = None
        async with environment.open(task):
            messages = tuple(await environment.prompt(task))
            self.rollout = replace(self.rollout, messages=messages, prompt=torch.arange(_count_tokens(messages)))
            while self.rollout.ending is None:
                await self._take_turn()
            result = await environment.score(task, self.rollout)
            self.rollout = replace(self.rollout, reward=result.reward, rewards=result.rewards, step_rewards=result.step_rewards)
            accuracy = (await environment.grade(task, self.rollout)).accuracy
            played = PlayedEpisode(self.rollout, self.texts, tuple(self.responses), result, accuracy)
        if played is None:
            raise RuntimeError(f"{environment.traits.title}.session swallowed an exception")
        return played

    async def _take_turn(self) -> None:
        text = self.texts[min(len(self.rollout.policy_turns), len(self.texts) - 1)]
        self.rollout = self.rollout.with_turn(make_turn(text), assistant(text))
        answer = await self.environment.respond(self.rollout.task, self.rollout)
        self.responses.append(None if answer is None else tuple((message.role, message.content) for message in answer))
        if answer is None:
            self.rollout = replace(self.rollout, ending=Ending.STOP)
        elif len(self.rollout.policy_turns) >= self.max_turns:
            self.rollout = replace(self.rollout, ending=Ending.TURNS)
        else:
            joined = "\n".join(message.content for message in answer)
            self.rollout = self.rollout.with_turn(observation_turn(list(range(_count_tokens(answer))), joined), *answer)


def _count_tokens(messages: Messages) -> int:
    return 1 + sum(len(message.content) for message in messages) // CHARACTERS_PER_TOKEN
