"""Every kernel of attention over a tree against a dense mask, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.dense_attention import Forest, dense, largest_error, random_rows

from strop.models.attention import flash_libraries
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.attention.blockwise_kernel import BlockwiseKernel
from strop.models.attention.flash_kernel import VarlenFlashKernel
from strop.models.attention.merged_attention import attend_in_pieces
from support.simulated_device.flash_attention import varlen_backward, varlen_forward


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


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(forest=forests(), window=st.sampled_from([None, 1, 3, 8]), joined=st.booleans(), sinks=st.booleans())
def test_gpu_calls_cover_the_tree(
    monkeypatch: pytest.MonkeyPatch, forest: Forest, window: int | None, joined: bool, sinks: bool
) -> None:
    """The sequences of different lengths that a GPU's kernel is called with, by products: a call a level, or one for the whole row, as
    rows with a window always are.
    """
    monkeypatch.setattr(flash_libraries, "aten", VarlenOnCpu)
    *rows, weight = random_rows(forest.tokens, 4, 2, 8, 8, seed=1)
    rows += [torch.linspace(-1, 2, 4, dtype=torch.float64).requires_grad_()] if sinks else []
    spec = AttentionSpec(0, 0.5, window, sinks=rows[-1] if sinks else None)
    segments = forest.plan().segments
    levels = segments.paths(window) if joined or window is not None else segments.levels()
    found = attend_in_pieces(*rows[:3], VarlenFlashKernel(), levels, spec)
    assert largest_error(found, dense(*rows[:3], spec, forest.seen(window)), rows, weight) < 1e-12


class VarlenOnCpu:
    """Stands in for the operators of a GPU, in float64."""

    _flash_attention_forward = staticmethod(varlen_forward)
    _flash_attention_backward = staticmethod(varlen_backward)
