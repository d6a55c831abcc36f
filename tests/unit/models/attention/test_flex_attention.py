"""FlexAttention with a block mask made from the tree."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.dense_attention import Forest, dense, largest_error, random_rows

from strop.models.attention.attention_plan import AttentionSpec
from strop.models.attention.flex_kernel import BLOCK, make_block_mask, tree_columns

SHALLOW = Forest((150, 90, 40, 130, 300, 70), (-1, 0, 0, 0, -1, 4))
DEEP = Forest((60, 100, 0, 90, 33, 270), (1, -1, 0, 2, 1, 4))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data(), window=st.sampled_from([None, 1, 40, 200]))
def test_the_block_mask_shows_what_the_tree_shows(data: st.DataObject, window: int | None) -> None:
    """A whole block shows everything, a block that is left out nothing, and the mask inside of the others is exact."""
    lengths = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=6).filter(any))
    parents = [data.draw(st.integers(-1, place - 1)) for place in range(len(lengths))]
    forest = Forest(tuple(lengths), tuple(parents))
    seen = forest.seen(window)
    mask = make_block_mask(*tree_columns(forest.plan().segments), window)
    index = torch.arange(forest.tokens)
    none = torch.zeros((), dtype=torch.int64)
    assert torch.equal(mask.mask_mod(none, none, index[:, None], index[None]), seen)
    for row in range(len(mask.kv_indices[0, 0])):
        queries = slice(row * BLOCK, (row + 1) * BLOCK)
        partial = mask.kv_indices[0, 0, row, : mask.kv_num_blocks[0, 0, row]].tolist()
        whole = mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].tolist()
        assert not {*partial} & {*whole}
        for column in range(len(mask.kv_indices[0, 0])):
            part = seen[queries, column * BLOCK : (column + 1) * BLOCK]
            assert bool(part.all()) if column in whole else column in partial or not bool(part.any())


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles FlexAttention")
@pytest.mark.exhaustive
@pytest.mark.parametrize(("window", "softcap"), [(50, None), (None, None), (None, 2.0), (50, 2.0)])
def test_flex_attention_equals_a_dense_mask(window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled on a CPU, in float32, with sinks and shared keys; two trees, of which one is deep and not in order."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    for forest in (SHALLOW, DEEP):
        *rows, weight = random_rows(forest.tokens, 4, 2, 16, 16, seed=2, dtype=torch.float32)
        sinks = torch.linspace(-1, 2, 4).requires_grad_()
        spec = AttentionSpec(0, 0.25, window, softcap, sinks)
        found = forest.plan("flex").attend(*rows, spec)
        assert largest_error(found, dense(*rows, spec, forest.seen(window)), [*rows, sinks], weight) < 1e-4
