"""The kernels of attention over a tree on a GPU against a dense mask, and their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.dense_attention import Forest, dense, random_rows

from strop.gpus import KIND
from strop.models.attention.attention_plan import AttentionSpec

pytestmark = pytest.mark.gpu

GPU = torch.get_device_module(KIND)

FORESTS = [Forest((150, 90, 40, 130, 300, 70), (-1, 0, 0, 0, -1, 4)), Forest((60, 100, 0, 90, 33, 270), (1, -1, 0, 2, 1, 4))]


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (50, None), (None, 2.0)])
@pytest.mark.parametrize("kernel", ["auto", "flash", "flex", "blockwise", "plain"])
def test_a_kernel_in_bfloat16_equals_a_dense_mask_in_float64(kernel: Any, window: int | None, softcap: float | None) -> None:
    """Values and gradients, with sinks and shared keys, relative to the largest: a few roundings of bfloat16."""
    for forest in FORESTS:
        *rows, weight = (row.detach().to(KIND) for row in random_rows(forest.tokens, 8, 2, 64, 64, seed=3, dtype=torch.bfloat16))
        exact = [row.double().requires_grad_() for row in (*rows, torch.linspace(-1, 2, 8, device=KIND))]
        rounded = [row.requires_grad_() for row in (*rows, torch.linspace(-1, 2, 8, device=KIND))]
        wanted = dense(*exact[:3], AttentionSpec(0, 0.125, window, softcap, exact[3]), forest.seen(window).to(KIND))
        found = forest.plan(kernel, KIND).attend(*rounded[:3], AttentionSpec(0, 0.125, window, softcap, rounded[3]))
        grads = [
            torch.autograd.grad((output * weight.to(output.dtype)).sum(), inputs)
            for output, inputs in ((found, rounded), (wanted, exact))
        ]
        for own, plain in zip((found, *grads[0]), (wanted, *grads[1]), strict=True):
            assert float((own - plain).abs().max()) < 0.03 * float(plain.abs().max())


def test_a_group_of_long_completions_stores_no_scores() -> None:
    """8 completions of 16k tokens on a prompt of 2k, forward and backward of one layer: linear in the tokens."""
    forest = Forest((2048, *[16384] * 8), (-1, *[0] * 8))
    heads, groups, size = 16, 4, 64
    rows = [
        torch.randn(forest.tokens, each, size, device=KIND, dtype=torch.bfloat16, requires_grad=True)
        for each in (heads, groups, groups)
    ]
    GPU.reset_peak_memory_stats()
    before = GPU.memory_allocated()
    forest.plan("auto", KIND).attend(*rows, AttentionSpec(0, 0.125)).sum().backward()
    assert GPU.max_memory_allocated() - before < 24 * forest.tokens * heads * size * 2
