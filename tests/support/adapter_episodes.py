"""Episodes of environments without a model: the policy's texts are given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import torch

from strop.data.sources.source import DataSource
from strop.environments.base import Environment
from strop.environments.compute_rewards import compute_rewards
from strop.environments.handle import LocalEnvironment
from strop.environments.rewards import RewardResult
from strop.types import Rollout, Task, Turn, user

Policy = Sequence[str] | Callable[[str], str]  # the texts, or what follows an observation


def policy_turn(text: str) -> Turn:
    return Turn(
        author="policy", tokens=torch.tensor([1]), text=text, logprobs=torch.zeros(1), versions=torch.zeros(1, dtype=torch.int32)
    )


async def episode(
    environment: Environment[Any], policy: Policy, *, index: int = 0, seed: int = 1, split: str = "train", turns: int = 30
) -> tuple[list[str | None], RewardResult]:
    """Play a task. Return what the policy saw, None at the end of a game, and its rewards."""
    task: Task = environment.tasks(DataSource(size=100, seed=seed, split=split))[index]
    async with environment.session(task):
        messages = await LocalEnvironment(environment).prompt(task)
        rollout = Rollout(task=task, sample=0, seed=0, messages=tuple(messages), prompt=torch.tensor([1]))
        seen: list[str | None] = [messages[-1].content]
        for turn in range(turns if callable(policy) else len(policy)):
            text = policy(str(seen[-1])) if callable(policy) else policy[turn]
            rollout = rollout.with_turn(policy_turn(text), user(text))
            answer = await environment.respond(task, rollout)
            seen.append(None if answer is None else answer[-1].content)
            if answer is None:
                break
        return seen, await compute_rewards(environment, task, rollout)


def play(environment: Environment[Any], policy: Policy, **options: Any) -> tuple[list[str | None], RewardResult]:
    return asyncio.run(episode(environment, policy, **options))
