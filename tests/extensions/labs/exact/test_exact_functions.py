"""Products, attention and functions whose bits do not depend on what is computed beside a row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from strop.extensions.labs.exact.exact_attention import ExactTree
from strop.extensions.labs.exact.exact_passes import ExactPasses, make_network_exact
from strop.extensions.labs.exact.row_products import (
    PackedWeights,
    ProductKind,
    TrustedShapes,
    exact_linear,
    in_reference_blocks,
    padded_size,
)
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.attention.tree_plan import TreePlan
from strop.models.network import Network
from strop.models.network_parts import forget_copies
from support.models import build


def test_a_changed_weight_is_read_at_once() -> None:
    weight, rows, weights = nn.Parameter(torch.ones(3, 4)), torch.ones(1, 4), PackedWeights()
    assert exact_linear(rows, weight, None, weights).tolist() == [[4.0] * 3]
    with torch.no_grad():
        weight.mul_(2)
    assert exact_linear(rows, weight, None, weights).tolist() == [[8.0] * 3]
    weight.data = torch.zeros(3, 4)
    assert exact_linear(rows, weight, None, weights).tolist() == [[0.0] * 3]


def test_a_change_that_leaves_no_trace_is_read_once_weights_are_forgotten() -> None:
    network = Network(build("llama"))
    make_network_exact(network)
    assert isinstance(network.exact, ExactPasses)
    weight, rows = nn.Parameter(torch.ones(3, 4)), torch.ones(1, 4)
    assert exact_linear(rows, weight, None, network.exact.weights).tolist() == [[4.0] * 3]
    weight.data.numpy().fill(2.0)  # as another process does in shared memory
    forget_copies(network)
    assert exact_linear(rows, weight, None, network.exact.weights).tolist() == [[8.0] * 3]


def test_a_shape_that_adds_in_another_order_is_not_trusted() -> None:
    kind = ProductKind("test", 64, 5, torch.float32, torch.device("cpu"))
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))

    def product(rows: Tensor) -> Tensor:
        order = torch.arange(64) if len(rows) == 16 else torch.arange(64).flip(0)  # as a library may choose by shape
        return reduce(torch.add, [rows[:, place, None] * weight[:, place] for place in order])

    shapes = TrustedShapes()
    assert shapes.trusts(kind, (16,), lambda: product)
    assert not shapes.trusts(kind, (48,), lambda: product)
    rows = torch.randn(48, 64)
    blocks = torch.cat([product(block) for block in rows.split(16)])
    assert torch.equal(in_reference_blocks(product, rows[:39], 1), blocks[:39])


@given(count=st.integers(1, 10**7), threads=st.integers(1, 96))
def test_no_thread_is_left_with_a_part_of_a_vector(count: int, threads: int) -> None:
    size = padded_size(count, threads)
    shares = min(threads, -(-size // 32768))
    assert size >= count and size % (64 * shares) == 0
    assert size - count <= 64 * threads + 64 * (threads - 1)


@dataclass(frozen=True)
class Tree:
    starts: Tensor
    lengths: Tensor
    parents: Tensor

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


def make_tree(*segments: tuple[int, int]) -> Tree:
    """``segments``: (length, parent)."""
    lengths = torch.tensor([length for length, _ in segments])
    return Tree(lengths.cumsum(0) - lengths, lengths, torch.tensor([parent for _, parent in segments]))


FOREST = make_tree((40, -1), (150, 0), (1, 0), (9, 1), (3, 1), (20, -1), (7, 5))


@pytest.mark.parametrize("window", [None, 7, 130])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (5.0, False), (None, True)])
def test_exact_attention_is_that_of_the_tree_with_its_gradients(window: int | None, softcap: float | None, sinks: bool) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(FOREST.tokens, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    inputs += [torch.randn(4, requires_grad=True)] if sinks else []
    spec, results = AttentionSpec(0, 0.4, window, softcap, inputs[3] if sinks else None), []
    for kind in (ExactTree, TreePlan):
        output = kind(FOREST.starts, FOREST.lengths, FOREST.parents, torch.device("cpu")).attend(
            inputs[0], inputs[1], inputs[2], spec
        )
        results.append([output, *torch.autograd.grad((output * torch.linspace(-1, 1, 8)).sum(), inputs)])
    for mine, usual in zip(*results, strict=True):
        torch.testing.assert_close(mine, usual, rtol=1e-4, atol=1e-5)
