"""What attention over a tree holds in memory grows with the tokens, not with their square."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.dense_attention import Forest, random_rows
from torch.profiler import ProfilerActivity, profile

from strop.models.attention.attention_plan import AttentionSpec
from strop.models.attention.tree_plan import TreePlan
from strop.models.network import Network
from support.models import build


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most that torch's allocator held at once during a call, over what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    held = peak = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def attention_peak(kernel: Any, longest: int, window: int | None = None) -> int:
    """Of a forward and backward pass over 4 completions of a prompt."""
    forest = Forest((longest // 8, *[longest] * 4), (-1, 0, 0, 0, 0))
    *rows, grad = random_rows(forest.tokens, 2, 1, 16, 16, seed=0, dtype=torch.float32)
    plan, spec = forest.plan(kernel), AttentionSpec(0, 0.25, window)
    return peak_bytes(lambda: plan.attend(*rows, spec).backward(grad))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("kernel", "window"), [("flash", None), ("blockwise", None), ("blockwise", 300), ("auto", None), ("auto", 300)]
)
def test_memory_is_linear_in_the_tokens(kernel: str, window: int | None) -> None:
    """Four times the tokens need at most 4.2 times the memory: some 10 copies of the queries, gradients included, and a block of scores."""
    short, long = (attention_peak(kernel, longest, window) for longest in (768, 3072))
    assert long <= 4.2 * short
    queries = (384 + 4 * 3072) * 2 * 16 * 4
    assert long <= 10.5 * queries


@pytest.mark.exhaustive
def test_plain_products_are_not_linear() -> None:
    """The measure sees what it is about."""
    assert attention_peak("plain", 2048) > 2 * 8 * attention_peak("plain", 256)


@pytest.mark.exhaustive
def test_sixteen_completions_of_sixteen_thousand_tokens_train_in_three_gigabytes() -> None:
    """A pass of a tiny Llama, forward and backward, over 264,192 tokens: at most 12 KiB for each."""
    network = Network(build("llama", layers=1), packed=True)
    lengths = torch.tensor([2048, *[16384] * 16])
    plan = TreePlan(lengths.cumsum(0) - lengths, lengths, torch.tensor([-1, *[0] * 16]), network.device)
    positions = torch.cat([torch.arange(2048), torch.arange(2048, 2048 + 16384).repeat(16)])[None]
    tokens = torch.randint(300, positions.shape, generator=torch.Generator().manual_seed(0))

    def run() -> None:
        hidden = network.decoder(tokens, position_ids=positions, plan=plan, use_cache=False).last_hidden_state
        hidden.square().mean().backward()

    assert peak_bytes(run) <= 12 * 1024 * positions.numel()
