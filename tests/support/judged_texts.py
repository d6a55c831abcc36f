"""Rollouts with conversations, and verifiers asked about one text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from strop.environments.verifier_registry import make_verifier
from strop.environments.verifiers.base import Reply, Score, call_score
from strop.types import Message, Rollout, Task, Turn, assistant, observation_turn, user


def value_of(
    name: str, text: str, *, answer: str = "", tokens: int = 0, messages: tuple[Message, ...] = (), **options: Any
) -> float:
    """The value of a text."""
    return score_of(name, text, answer=answer, tokens=tokens, messages=messages, **options).value


def score_of(
    name: str,
    text: str,
    *,
    answer: str = "",
    tokens: int = 0,
    messages: tuple[Message, ...] = (),
    row: Any = None,
    **options: Any,
) -> Score:
    task = Task(id="t", question="q?", answer=answer, metadata=row or {})
    reply = Reply(text=text, messages=messages or (user("q?"), assistant(text)), tokens=tokens)
    score = asyncio.run(call_score(make_verifier(name, options), task, reply))
    return score if isinstance(score, Score) else Score(float(score))


def talk_of(task: Task, *texts: str, version: int = 0, tokens: int = 3) -> Rollout:
    """A rollout of several turns of the policy, with a user's message between them."""
    rollout = Rollout(task=task, sample=0, seed=0, messages=(user(task.question),), prompt=torch.tensor([1]), version=version)
    for number, text in enumerate(texts):
        if number:
            rollout = rollout.with_turn(observation_turn([9, 9], f"go on {number}"), user(f"go on {number}"))
        turn = Turn(
            author="policy",
            tokens=torch.arange(tokens),
            text=text,
            logprobs=torch.zeros(tokens),
            versions=torch.zeros(tokens, dtype=torch.int32),
        )
        rollout = rollout.with_turn(turn, assistant(text))
    return rollout


@pytest.fixture
def value() -> Callable[..., float]:
    return value_of


@pytest.fixture
def scored() -> Callable[..., Score]:
    return score_of


@pytest.fixture
def talk() -> Callable[..., Rollout]:
    return talk_of
