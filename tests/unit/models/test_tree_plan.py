"""The attention of packed rows against a dense mask written out token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.models.attention.attention_plan import AttentionSpec, masked_attention
from strop.models.attention.tree_plan import TreePlan


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec, seen: torch.Tensor) -> torch.Tensor:
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data(), window=st.sampled_from([None, 1, 3, 8]), softcap=st.sampled_from([None, 2.0]))
def test_a_token_sees_its_own_segment_causally_and_its_ancestors_whole(
    data: st.DataObject, window: int | None, softcap: float | None
) -> None:
    """Forests of any depth, with empty segments, in float64: outputs and gradients to 1e-12."""
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=7).filter(any))
    parents = [data.draw(st.integers(-1, place - 1)) for place in range(len(lengths))]
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    total = sum(lengths)

    path: list[list[int]] = []  # the tokens a segment's own tokens come after, in order
    for parent in parents:
        path.append([] if parent == -1 else [*path[parent], *range(starts[parent], starts[parent] + lengths[parent])])
    seen = torch.zeros(total, total, dtype=torch.bool)
    for segment, length in enumerate(lengths):
        for offset in range(length):
            visible = [*path[segment], *range(starts[segment], starts[segment] + offset + 1)]
            for token in visible[-(window or total) :]:
                seen[starts[segment] + offset, token] = True

    generator = torch.Generator().manual_seed(total)
    inputs = [torch.randn(total, heads, 4, generator=generator, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)]
    spec = AttentionSpec(0, 0.5, window, softcap)
    plan = TreePlan(torch.tensor(starts), torch.tensor(lengths), torch.tensor(parents), torch.device("cpu"))
    found, wanted = plan.attend(*inputs, spec), dense(*inputs, spec, seen)
    assert float((found - wanted).detach().abs().max()) < 1e-12
    weight = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    for own, plain in zip(
        torch.autograd.grad((found * weight).sum(), inputs), torch.autograd.grad((wanted * weight).sum(), inputs), strict=True
    ):
        assert float((own - plain).abs().max()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_may_have_another_size_than_keys(dtype: torch.dtype) -> None:
    """As in latent attention (DeepSeek V3): by the fused kernel and by plain products, which a CPU takes in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 5, size, generator=generator) for heads, size in ((4, 12), (2, 12), (2, 8)))
    found = masked_attention(*(tensor.to(dtype) for tensor in (query, key, value)), None, AttentionSpec(0, 0.3), causal=True)
    scores = 0.3 * query @ key.repeat_interleave(2, 1).transpose(2, 3)
    hidden = torch.ones(5, 5).triu(1).bool()
    wanted = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value.repeat_interleave(2, 1)
    assert found.shape == wanted.shape
    assert torch.allclose(found.float(), wanted, atol=0.03 if dtype == torch.bfloat16 else 1e-5)
