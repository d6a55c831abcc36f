"""What vLLM's CPU build does wrong, and Strop's workers put right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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


def test_heads_are_joined_to_rows_for_the_kernel_of_rotary_positions() -> None:
    from strop.generation.vllm.vllm_patches import join_heads

    states = torch.arange(24.0).view(2, 3, 4)
    assert join_heads(states).data_ptr() == states.data_ptr() and join_heads(states).shape == (2, 12)
    assert join_heads(states[..., 2:]).tolist() == [[2, 3, 6, 7, 10, 11], [14, 15, 18, 19, 22, 23]]
    assert join_heads(states[0]).shape == (3, 4)


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


def raises(error: Exception) -> Callable[[], None]:
    def apply() -> None:
        raise error

    return apply


def test_a_patch_that_does_not_fit_refuses_the_version_and_names_those_that_do(caplog: pytest.LogCaptureFixture) -> None:
    from strop.generation.vllm.vllm_patches import VllmPatch, apply_patch

    missing = raises(AttributeError("no attribute 'sample'"))
    patch = VllmPatch(bug="it crashes", apply=missing, checked=("0.32.0",))
    with pytest.raises(RuntimeError, match=r"vLLM 0\.40\.0 does not have .*it crashes.*checked with, 0\.32\.0 \(constraints"):
        apply_patch(patch, "0.40.0")
    assert "was checked with 0.32.0 only" in caplog.text
    caplog.clear()
    apply_patch(VllmPatch(bug="drafts", apply=missing, checked=("0.32.0",), only_drafts=True), "0.40.0")
    assert "it is not applied" in caplog.text
    caplog.clear()
    apply_patch(VllmPatch(bug="it crashes", apply=lambda: None, checked=("0.32.0",)), "0.32.0")
    assert not caplog.text


def test_every_patch_was_checked_with_the_pinned_versions() -> None:
    from strop.generation.vllm.versions import CHECKED_VERSIONS
    from strop.generation.vllm.vllm_patches import PATCHES

    assert all(set(patch.checked) == set(CHECKED_VERSIONS) for patch in PATCHES)
