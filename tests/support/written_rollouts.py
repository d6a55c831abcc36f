"""Rollouts as the episode code makes them, from text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from strop.types import Rollout, Task, Turn

Wrote = Callable[..., Rollout]


def rollout_of(task: Task, *texts: str) -> Rollout:
    turns = tuple(
        Turn(
            author="policy",
            tokens=torch.tensor([1]),
            text=text,
            logprobs=torch.zeros(1),
            versions=torch.zeros(1, dtype=torch.int32),
        )
        for text in texts
    )
    return Rollout(task=task, sample=0, seed=0, messages=(), prompt=torch.tensor([1]), turns=turns)


@pytest.fixture
def wrote() -> Wrote:
    """A rollout of a task in which the policy wrote these texts, one a turn."""
    return rollout_of
