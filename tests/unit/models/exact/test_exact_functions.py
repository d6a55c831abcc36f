"""Products, attention and functions whose bits do not depend on what is computed beside a row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from strop.models.attention.attention_plan import AttentionSpec
from strop.models.attention.tree_plan import TreePlan
from strop.models.exact.exact_attention import exact_attention
from strop.models.exact.exact_logprobs import sampled_logprobs
from strop.models.exact.exact_tree import ExactTree
from strop.models.exact.packed_weights import PackedWeights
from strop.models.exact.row_products import exact_linear
from strop.models.exact.trusted_shapes import ProductKind, TrustedShapes, in_reference_blocks
from strop.models.exact.whole_vectors import apply_whole_vectors, padded_size

BOTH = (torch.float32, torch.bfloat16)
FUNCTIONS = (F.silu, F.gelu, torch.sigmoid, torch.rsqrt, torch.tanh, torch.exp, torch.cos)
SIZES = ((32, 48), (48, 32), (576, 192), (12, 307))


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@settings(max_examples=25, deadline=None)
@given(size=st.sampled_from(SIZES), start=st.integers(0, 40), count=st.integers(1, 200), seed=st.integers(0, 9))
def test_a_row_of_a_product_has_the_same_bits_beside_any_others(
    dtype: torch.dtype, size: tuple[int, int], start: int, count: int, seed: int
) -> None:
    torch.manual_seed(seed)
    weight, rows, weights = nn.Parameter(torch.randn(size[1], size[0])), torch.randn(300, size[0]), PackedWeights()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        every = exact_linear(rows, weight, None, weights)
        some = exact_linear(rows[start : start + count].clone(), weight, None, weights)
    assert every.dtype == dtype
    assert torch.equal(some, every[start : start + count])


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_an_exact_product_is_the_ordinary_one_with_its_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, rows = nn.Linear(24, 40), torch.randn(3, 37, 24, requires_grad=True)
    results = []
    for exact in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = exact_linear(rows, layer.weight, layer.bias, PackedWeights()) if exact else layer(rows)
        results.append([output, *torch.autograd.grad(output.float().square().sum(), [rows, layer.weight, layer.bias])])
    bounds = {"rtol": 1e-2, "atol": 0.1} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
    for mine, usual in zip(*results, strict=True):
        torch.testing.assert_close(mine, usual, **bounds)


def test_a_changed_weight_is_read_at_once() -> None:
    weight, rows, weights = nn.Parameter(torch.ones(3, 4)), torch.ones(1, 4), PackedWeights()
    assert exact_linear(rows, weight, None, weights).tolist() == [[4.0] * 3]
    with torch.no_grad():
        weight.mul_(2)
    assert exact_linear(rows, weight, None, weights).tolist() == [[8.0] * 3]
    weight.data = torch.zeros(3, 4)
    assert exact_linear(rows, weight, None, weights).tolist() == [[0.0] * 3]


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


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@settings(max_examples=20, deadline=None)
@given(start=st.integers(0, 200), count=st.integers(1, 5000))
def test_an_element_has_the_same_bits_at_every_place(function: object, start: int, count: int) -> None:
    assert callable(function)
    values = torch.randn(8192, generator=torch.Generator().manual_seed(0)).abs() * 3
    every = apply_whole_vectors(function, values)
    assert torch.equal(apply_whole_vectors(function, values[start : start + count]), every[start : start + count])
    torch.testing.assert_close(every, function(values))


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


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@settings(max_examples=15, deadline=None)
@given(
    position=st.integers(0, 299),
    window=st.sampled_from([None, 9, 140]),
    heads=st.sampled_from([(4, 2), (3, 3), (6, 1)]),
    others=st.integers(0, 5),
)
def test_a_query_has_the_same_bits_alone_and_in_its_sequence(
    dtype: torch.dtype, position: int, window: int | None, heads: tuple[int, int], others: int
) -> None:
    """As when decoding: a query of its own, beside queries of other sequences, over a cache that holds anything behind its position."""
    torch.manual_seed(position)
    query, key, value = (torch.randn(1, count, 384, 16).to(dtype) for count in (heads[0], heads[1], heads[1]))
    spec = AttentionSpec(0, 0.25, window)
    whole = exact_attention(query, key, value, torch.arange(384)[None], spec)
    span = (position // 128 + 1) * 128
    cache = [torch.randn(1 + others, heads[1], span, 16).to(dtype) for _ in range(2)]
    for cached, own in zip(cache, (key, value), strict=True):
        cached[0, :, : position + 1] = own[0, :, : position + 1]
    beside = torch.randn(1 + others, heads[0], 1, 16).to(dtype)
    beside[0] = query[0, :, position : position + 1]
    positions = torch.randint(span, (1 + others, 1))
    positions[0] = position
    alone = exact_attention(beside, cache[0], cache[1], positions, spec)
    assert torch.equal(alone[0, :, 0], whole[0, :, position])


@pytest.mark.parametrize("vocabulary", [307, 40_000])
def test_log_probabilities_of_a_row_have_the_same_bits_alone(vocabulary: int) -> None:
    torch.manual_seed(0)
    scaled, tokens = torch.randn(9, vocabulary), torch.arange(9)
    scaled[:, 100:200] = float("-inf")
    together = torch.stack(sampled_logprobs(scaled, tokens))
    for row in range(9):
        alone = torch.stack(sampled_logprobs(scaled[row : row + 1].clone(), tokens[row : row + 1]))
        assert torch.equal(alone[:, 0], together[:, row])
