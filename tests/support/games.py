"""Episodes in which a script writes the policy's turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from strop.environments.base import Environment
from strop.environments.handle import LocalEnvironment
from strop.generation.base import Completion
from strop.models.chat_template import ChatTemplate
from strop.rollouts.episode import EpisodeRules, run_episode
from strop.sampling import Sampling
from strop.types import Rollout, Task
from support.tokenizer import build_tokenizer

_tokenizer = cache(build_tokenizer)


class ScriptedGenerator:
    """Says one text after the other, then ends its turns at once. Remembers each request's sampling and prompt."""

    version = 0

    def __init__(self, *texts: str) -> None:
        self.tokenizer = _tokenizer()
        self.texts = list(texts)
        self.requests: list[tuple[str, Sampling]] = []
        self.seeds: list[int] = []

    async def generate(self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "") -> Completion:
        self.requests.append((self.tokenizer.decode(list(prompt)), sampling))
        self.seeds.append(seed)
        text = self.texts.pop(0) if self.texts else ""
        tokens = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        return Completion(
            tokens=torch.tensor(tokens), logprobs=torch.zeros(len(tokens)), versions=torch.zeros(len(tokens), dtype=torch.int32),
            text=text, stopped=True,
        )  # fmt: skip

    async def close(self) -> None: ...


def run_script(
    environment: Environment[Any], task: Task, generator: ScriptedGenerator, *, stops: Sequence[str] = (), seed: int = 0
) -> Rollout:
    return asyncio.run(
        run_episode(
            LocalEnvironment(environment), task, 0, seed, generator=generator, template=ChatTemplate(generator.tokenizer),
            sampling=Sampling(max_new_tokens=100_000, stop_strings=tuple(stops)),
            rules=EpisodeRules(max_turns=len(generator.texts), max_length=1_000_000),
        )
    )  # fmt: skip


def played(environment: Environment[Any], task: Task, *texts: str, stops: Sequence[str] = ()) -> Rollout:
    """Return the episode in which the policy writes these texts. Raises AssertionError if it failed."""
    rollout = run_script(environment, task, ScriptedGenerator(*texts), stops=stops)
    assert rollout.error is None, rollout.error
    return rollout


def see(environment: Environment[Any], task: Task, *texts: str) -> str:
    """Return what the environment answers to the last of these texts."""
    return played(environment, task, *texts, "").messages[-2].content
