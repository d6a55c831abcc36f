"""What the canary asks, and what the learner is asked to score."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.models.chat_template import ChatTemplate
from strop.sampling import Sampling
from strop.types import Batch
from strop.weight_sync.base import CanarySample
from strop.weight_sync.canary import CANARY_TOKENS, Canary, make_canary
from strop.weight_sync.verification import VerificationFailed
from strop.weight_sync.weight_sync_config import WeightSyncConfig


async def tokens_as_logprobs(batch: Batch) -> Tensor:
    return batch.target.double()


def canary(
    tokenizer: Any, *, config: WeightSyncConfig | None = None, precision: str = "float32", max_length: int = 512
) -> Canary:
    asked = Sampling(temperature=0.7, top_k=5, record_sampling_mask=True, max_new_tokens=300, stop_strings=("x",), entropy=True)
    return make_canary(
        ChatTemplate(tokenizer),
        config or WeightSyncConfig(),
        asked,
        tokens_as_logprobs,
        precision=precision,
        max_length=max_length,
        share_prefixes=True,
        seed=3,
    )


def test_it_samples_as_the_run_does_but_a_few_tokens_that_nothing_stops(tokenizer: Any) -> None:
    expected = Sampling(temperature=0.7, top_k=5, record_sampling_mask=True, max_new_tokens=CANARY_TOKENS)
    assert canary(tokenizer).sampling == expected and canary(tokenizer).seed == 3


def test_its_prompts_leave_room_in_the_engines_longest_sequence(tokenizer: Any) -> None:
    assert all(len(prompt) > 32 for prompt in canary(tokenizer).prompts), "they fill blocks of a prefix cache"
    assert [len(prompt) for prompt in canary(tokenizer, max_length=CANARY_TOKENS + 7).prompts] == [7, 7]
    assert [len(prompt) for prompt in canary(tokenizer, max_length=4).prompts] == [1, 1]


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 0.002), ("bfloat16", 0.1)])
def test_the_tolerance_is_the_precision_s_unless_it_is_set(tokenizer: Any, precision: str, tolerance: float) -> None:
    assert canary(tokenizer, precision=precision).tolerance == tolerance
    assert canary(tokenizer, precision=precision, config=WeightSyncConfig(canary_tolerance=0.3)).tolerance == 0.3


def test_the_learner_scores_each_sample_after_its_prompt(tokenizer: Any) -> None:
    checked = canary(tokenizer)
    tokens = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    samples = [CanarySample(tokens=each, logprobs=torch.zeros(len(each)), cached=0) for each in tokens]
    scores = asyncio.run(_score(checked, samples))
    assert [score.tolist() for score in scores] == [[5.0, 6.0, 7.0], [8.0, 9.0]]
    assert all(score.dtype == torch.float32 for score in scores)


async def _score(checked: Canary, samples: list[CanarySample]) -> list[Tensor]:
    return list(await checked.score(checked.prompts, samples))


@dataclass
class Caching:
    """An engine that finds so many tokens of each prompt in its prefix cache."""

    cached: list[int]
    name: str = "engine 0"

    async def sample_canary(self, prompt: Sequence[int], *, sampling: Sampling, seed: int) -> CanarySample:
        return CanarySample(tokens=torch.tensor([5]), logprobs=torch.full((1,), 5.0), cached=self.cached.pop(0))


@pytest.mark.parametrize(("cached", "refused"), [((0, 0), False), ((0, 3), False), ((0, 4), True), ((1, 0), True)])
def test_what_all_prompts_begin_with_may_be_cached_after_the_first(
    cached: tuple[int, int], refused: bool, tokenizer: Any
) -> None:
    checked = replace(canary(tokenizer), prompts=((1, 2, 3, 4, 5), (1, 2, 3, 9, 9)))
    with pytest.raises(VerificationFailed, match="prefix cache") if refused else nullcontext():
        asyncio.run(checked.check(Caching(list(cached))))  # type: ignore[arg-type]
