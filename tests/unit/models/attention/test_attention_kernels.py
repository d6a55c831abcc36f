"""Every kernel of attention over a tree against a dense mask, in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.dense_attention import Forest, dense, largest_error, random_rows
from torch import Tensor

from strop.models.attention import flash_kernel
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.attention.blockwise_kernel import BlockwiseKernel
from strop.models.attention.flash_kernel import VarlenFlashKernel
from strop.models.attention.merged_attention import attend_in_pieces


@st.composite
def forests(draw: Any) -> Forest:
    """Forests of any depth, with empty segments, whose segments may stand in any order of the row."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any))
    parents = [draw(st.integers(-1, place - 1)) for place in range(len(lengths))]
    order = draw(st.permutations(range(len(lengths)))) if draw(st.booleans()) else list(range(len(lengths)))
    where = {old: new for new, old in enumerate(order)}
    return Forest(tuple(lengths[old] for old in order), tuple(where[parents[old]] if parents[old] >= 0 else -1 for old in order))


SHAPES = [(4, 2, 4, 4), (2, 2, 6, 6), (6, 1, 4, 3)]  # heads, key-value heads, size, size of values


@pytest.mark.parametrize("kernel", ["plain", "flash", "blockwise"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    forest=forests(),
    shape=st.sampled_from(SHAPES),
    window=st.sampled_from([None, None, 1, 3, 8]),
    softcap=st.sampled_from([None, None, 2.0]),
    sinks=st.booleans(),
)
def test_a_kernel_equals_a_dense_mask(
    kernel: Any, forest: Forest, shape: tuple[int, int, int, int], window: int | None, softcap: float | None, sinks: bool
) -> None:
    *rows, weight = random_rows(forest.tokens, *shape, seed=forest.tokens)
    spec = AttentionSpec(0, 0.5, window, softcap)
    if sinks:
        rows.append(torch.linspace(-1, 2, shape[0], dtype=torch.float64).requires_grad_())
        spec = replace(spec, sinks=rows[-1])
    found, wanted = forest.plan(kernel).attend(*rows[:3], spec), dense(*rows[:3], spec, forest.seen(window))
    assert largest_error(found, wanted, rows, weight) < 1e-12


@settings(max_examples=60, deadline=None, derandomize=True)
@given(forest=forests(), window=st.sampled_from([None, 1, 3, 8]), softcap=st.sampled_from([None, 2.0]))
def test_blocks_smaller_than_segments_give_the_same(forest: Forest, window: int | None, softcap: float | None) -> None:
    """Blocks of 2 queries and 3 keys: the diagonal, the edge of a window and the ends of segments cross them everywhere."""
    *rows, weight = random_rows(forest.tokens, 4, 2, 4, 4, seed=forest.tokens)
    rows.append(torch.linspace(-1, 2, 4, dtype=torch.float64).requires_grad_())
    spec = AttentionSpec(0, 0.5, window, softcap, rows[-1])
    found = attend_in_pieces(*rows[:3], BlockwiseKernel(2, 3), forest.plan().levels(window), spec)
    assert largest_error(found, dense(*rows[:3], spec, forest.seen(window)), rows, weight) < 1e-12


def test_gpu_calls_cover_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequences of different lengths that a GPU's kernel is called with, computed one by one by the CPU's."""
    monkeypatch.setattr(flash_kernel, "aten", VarlenOnCpu())
    chosen = [
        Forest((3, 5, 1, 7), (-1, 0, 0, 0)),
        Forest((2, 0, 4, 3, 6, 5), (-1, 0, 1, 2, -1, 4)),
        Forest((4, 3, 2, 5), (2, 0, -1, 2)),
    ]
    for forest in chosen:
        *rows, weight = random_rows(forest.tokens, 4, 2, 8, 8, seed=1)
        spec = AttentionSpec(0, 0.5)
        found = attend_in_pieces(*rows, VarlenFlashKernel(), forest.plan().levels(None), spec)
        assert largest_error(found, dense(*rows, spec, forest.seen(None)), rows, weight) < 1e-12


class VarlenOnCpu:
    """Stands in for the operators of a GPU: sequences one after the other, lse [heads, T]."""

    def _flash_attention_forward(
        self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float
    ) -> tuple[Tensor, Tensor]:
        output, lse = torch.zeros_like(query), query.new_zeros(query.shape[1], len(query))
        for rows, columns in self._sequences(*rest[:2]):
            batch = [part.transpose(0, 1)[None] for part in (query[rows], key[columns], value[columns])]
            part, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*batch, 0.0, rest[5], scale=scale)
            output[rows], lse[:, rows] = part[0].transpose(0, 1), total[0]
        return output, lse

    def _flash_attention_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, *rest: Any, scale: float
    ) -> tuple[Tensor, ...]:
        grads = [torch.zeros_like(row) for row in (query, key, value)]
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        for rows, columns in self._sequences(*rest[:2]):
            places = (rows, rows, columns, columns, rows)
            batch = [
                part[place].transpose(0, 1)[None] for part, place in zip((grad, query, key, value, output), places, strict=True)
            ]
            parts = backward(*batch, lse[:, rows][None], 0.0, rest[5], scale=scale)
            for whole, part, place in zip(grads, parts, (rows, columns, columns), strict=True):
                whole[place] = part[0].transpose(0, 1)
        return tuple(grads)

    def _sequences(self, query_ends: Tensor, key_ends: Tensor) -> list[tuple[slice, slice]]:
        ends = (query_ends.tolist(), key_ends.tolist())
        return [tuple(slice(*pair) for pair in pairs) for pairs in zip(*(pairwise(each) for each in ends), strict=True)]  # type: ignore[misc]
