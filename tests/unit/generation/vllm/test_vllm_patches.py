"""What vLLM's CPU build does wrong, and Strop's workers put right."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch

from strop.sampling import Sampling

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel


def test_values_of_requests_are_expanded_to_their_drafts() -> None:
    from strop.generation.vllm.vllm_patches import expand_batch_to_tokens

    temperatures = torch.tensor([0.6, 0.0, 1.5])
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    assert (
        expand_batch_to_tokens(temperatures, ends, 5, replace_to=1).tolist() == torch.tensor([0.6, 0.6, 1.5, 1.5, 1.5]).tolist()
    )
    assert expand_batch_to_tokens(torch.tensor([0.0, 7.0]), torch.tensor([1, 2]), 2, replace_to=1).tolist() == [1.0, 7.0]
    assert expand_batch_to_tokens(temperatures, torch.zeros(3, dtype=torch.int32), 0).tolist() == []


@pytest.mark.slow
def test_prompts_that_are_read_in_pieces_give_the_tokens_of_their_seeds(room: BackgroundLoop, served: ServedModel) -> None:
    """More prompt tokens at once than a step reads: some prompts are cut, which ends an engine that is not repaired."""
    sampling = Sampling(max_new_tokens=6)
    noise = torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, 300, (230,), generator=noise).tolist() for _ in range(60)]

    async def together() -> list[list[int]]:
        requests = [served.pool.generate(prompt, sampling=sampling, seed=seed) for seed, prompt in enumerate(prompts)]
        return [completion.tokens.tolist() for completion in await asyncio.gather(*requests)]

    restarts = served.pool.restarts
    at_once = room.run(together())
    assert served.pool.restarts == restarts
    for seed, prompt in enumerate(prompts[::10]):
        alone = room.run(served.pool.generate(prompt, sampling=sampling, seed=10 * seed)).tokens.tolist()
        assert alone == at_once[10 * seed]
