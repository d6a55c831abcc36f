"""Attention by ranks that each have some of the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks
from torch import Tensor

from strop.learner.parallel.context_parallel import UlyssesPlan, check_heads
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.attention.tree_plan import TreePlan

SHAPES = {  # heads, heads of keys, size of queries and keys, size of values
    "as many keys as queries": (4, 4, 6, 6),
    "shared keys": (8, 4, 6, 6),
    "one key for every two ranks": (8, 2, 6, 6),
    "one key for all": (4, 1, 6, 6),
    "values of another size": (4, 4, 6, 3),
}
SPECS = {
    "plain": AttentionSpec(0, 0.4),
    "window": AttentionSpec(0, 0.4, window=4),
    "softcap": AttentionSpec(0, 0.4, softcap=2.0),
    "both": AttentionSpec(0, 0.4, window=4, softcap=2.0),
}
# Two prompts, one with two completions, of which the first goes on in a branch; padded to 20.
STARTS, PARENTS, TOKENS = [0, 5, 8, 11, 14, 16], [-1, 0, 0, 1, -1, 4], 19


def plan() -> TreePlan:
    lengths = torch.tensor([*STARTS[1:], TOKENS]) - torch.tensor(STARTS)
    return TreePlan(torch.tensor(STARTS), lengths, torch.tensor(PARENTS), torch.device("cpu"))


def inputs(shape: tuple[int, int, int, int]) -> list[Tensor]:
    """Query, key, value and a weight of every output, [20, heads, size] each."""
    heads, keys, size, values = shape
    generator = torch.Generator().manual_seed(heads * keys)
    sizes = [(heads, size), (keys, size), (keys, values), (heads, values)]
    return [torch.randn(20, *one, generator=generator, dtype=torch.float64) for one in sizes]


def attended(rank: int, ranks: int) -> dict[str, tuple[Tensor, ...]]:
    """Outputs and gradients of this rank's tokens."""
    found: dict[str, tuple[Tensor, ...]] = {}
    own = slice(rank * 20 // ranks, (rank + 1) * 20 // ranks)
    for name, shape in SHAPES.items():
        for kind, spec in SPECS.items():
            *tensors, weight = (tensor[own].clone() for tensor in inputs(shape))
            for tensor in tensors:
                tensor.requires_grad_(True)
            exchange = UlyssesPlan(plan(), torch.distributed.group.WORLD, TOKENS)
            output = exchange.attend(*tensors, spec)
            (output * weight).sum().backward()
            found[f"{name}, {kind}"] = (output.detach(), *(tensor.grad for tensor in tensors))  # type: ignore[arg-type]
    return found


def alone(shape: tuple[int, int, int, int], spec: AttentionSpec) -> list[Tensor]:
    *tensors, weight = inputs(shape)
    for tensor in tensors:
        tensor.requires_grad_(True)
    output = plan().attend(*(tensor[:TOKENS] for tensor in tensors), spec)
    (output * weight[:TOKENS]).sum().backward()
    padding = torch.zeros(1, *output.shape[1:], dtype=output.dtype)
    gradients: list[Any] = [tensor.grad for tensor in tensors]
    return [torch.cat([output.detach(), padding]), *gradients]


def test_every_rank_attends_as_one_device_does() -> None:
    """With prefixes, windows, softcaps, keys that several heads share, and values of another size than keys."""
    ranks = run_on_ranks(4, attended, 4)
    for name, shape in SHAPES.items():
        for kind, spec in SPECS.items():
            for place, wanted in enumerate(alone(shape, spec)):
                found = torch.cat([rank[f"{name}, {kind}"][place] for rank in ranks])
                assert torch.allclose(found, wanted, atol=1e-12), (name, kind, place)


def test_heads_that_cannot_be_divided_are_refused() -> None:
    check_heads(6, 3)
    with pytest.raises(ValueError, match="set context_parallel_size to a divisor of 6"):
        check_heads(6, 4)
