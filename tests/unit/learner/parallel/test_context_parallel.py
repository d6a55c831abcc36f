"""Attention by ranks that each have some of the tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.dense_attention import Forest
from tests.support.ranks import run_on_ranks
from torch import Tensor

from strop.learner.parallel.context.context_plan import ContextPlan
from strop.models.attention.attention_plan import AttentionSpec

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
RINGS = {  # shapes whose heads the ranks do not divide
    "shared keys": (6, 3, 6, 6),
    "one head": (1, 1, 6, 6),
    "values of another size": (5, 5, 6, 3),
}
# Two prompts, one with two completions, of which the first goes on in a branch; padded to 20.
FOREST = Forest((5, 3, 3, 3, 2, 3), (-1, 0, 0, 1, -1, 4))
SCATTERED = Forest((3, 4, 2, 5, 3, 2), (2, 0, -1, 2, 1, -1))  # parents stand behind their children


def inputs(shape: tuple[int, int, int, int]) -> list[Tensor]:
    """Query, key, value and a weight of every output, [20, heads, size] each, and sinks [heads]."""
    heads, keys, size, values = shape
    generator = torch.Generator().manual_seed(heads * keys)
    sizes = [(heads, size), (keys, size), (keys, values), (heads, values)]
    rows = [torch.randn(20, *one, generator=generator, dtype=torch.float64) for one in sizes]
    return [*rows, torch.randn(heads, generator=generator, dtype=torch.float64)]


def attended(
    rank: int, ranks: int, shapes: dict[str, tuple[int, int, int, int]], forest: Forest
) -> dict[str, tuple[Tensor, ...]]:
    """Outputs and gradients of this rank's tokens, and of the sinks."""
    found: dict[str, tuple[Tensor, ...]] = {}
    own = slice(rank * 20 // ranks, (rank + 1) * 20 // ranks)
    for name, shape in shapes.items():
        for kind, spec in SPECS.items():
            *tensors, weight, sinks = inputs(shape)
            tensors = [tensor[own].clone().requires_grad_() for tensor in tensors]
            sinks.requires_grad_()
            exchange = ContextPlan(forest.plan(), torch.distributed.group.WORLD, forest.tokens)
            output = exchange.attend(*tensors, replace(spec, sinks=sinks))
            (output * weight[own]).sum().backward()
            found[f"{name}, {kind}"] = (output.detach(), *(tensor.grad for tensor in (*tensors, sinks)))  # type: ignore[misc]
    return found


def alone(shape: tuple[int, int, int, int], spec: AttentionSpec, forest: Forest) -> list[Tensor]:
    *tensors, weight, sinks = inputs(shape)
    for tensor in (*tensors, sinks):
        tensor.requires_grad_(True)
    output = forest.plan().attend(*(tensor[: forest.tokens] for tensor in tensors), replace(spec, sinks=sinks))
    (output * weight[: forest.tokens]).sum().backward()
    padding = torch.zeros(20 - forest.tokens, *output.shape[1:], dtype=output.dtype)
    gradients: list[Any] = [tensor.grad for tensor in (*tensors, sinks)]
    return [torch.cat([output.detach(), padding]), *gradients]


@pytest.mark.parametrize(
    ("ranks", "shapes", "forest"),
    [(4, SHAPES, FOREST), (4, RINGS, FOREST), (2, RINGS, SCATTERED)],
    ids=["heads", "ring", "ring of two"],
)
def test_every_rank_attends_as_one_device_does(ranks: int, shapes: dict[str, tuple[int, int, int, int]], forest: Forest) -> None:
    """With prefixes, windows, softcaps, sinks, keys that several heads share, and values of another size than keys.

    In a ring too, where the number of heads does not divide: each rank sees each other's keys. A sink's gradients add up over the ranks.
    """
    found = run_on_ranks(ranks, attended, ranks, shapes, forest)
    for name, shape in shapes.items():
        for kind, spec in SPECS.items():
            *columns, sinks = alone(shape, spec, forest)
            for place, wanted in enumerate(columns):
                rows = torch.cat([rank[f"{name}, {kind}"][place] for rank in found])
                assert torch.allclose(rows, wanted, atol=1e-12), (name, kind, place)
            assert torch.allclose(sum(rank[f"{name}, {kind}"][-1] for rank in found), sinks, atol=1e-12), (name, kind)  # type: ignore[arg-type]
