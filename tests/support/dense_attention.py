"""Attention over a forest of segments written out with a mask of tokens x tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strop.models.attention.attention_plan import AttentionSpec
from strop.models.attention.kernel_choice import AttentionKernel
from strop.models.attention.tree_plan import TreePlan


@dataclass(frozen=True)
class Forest:
    """Segments of a row, in its order; -1 is the parent of a root."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def starts(self) -> list[int]:
        return [sum(self.lengths[:place]) for place in range(len(self.lengths))]

    def plan(self, kernel: AttentionKernel = "auto") -> TreePlan:
        columns = (torch.tensor(column) for column in (self.starts, self.lengths, self.parents))
        return TreePlan(*columns, torch.device("cpu"), kernel)

    def seen(self, window: int | None) -> Tensor:
        """[T, T] bool: which tokens a token attends to."""
        path: dict[int, list[int]] = {-1: []}
        seen = torch.zeros(self.tokens, self.tokens, dtype=torch.bool)
        waiting = list(range(len(self.lengths)))
        while waiting:  # parents may stand after their children
            segment = waiting.pop(0)
            if self.parents[segment] not in path:
                waiting.append(segment)
                continue
            before, start = path[self.parents[segment]], self.starts[segment]
            path[segment] = [*before, *range(start, start + self.lengths[segment])]
            for offset in range(self.lengths[segment]):
                visible = path[segment][: len(before) + offset + 1]
                seen[start + offset, visible if window is None else visible[-window:]] = True
        return seen


def dense(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, seen: Tensor) -> Tensor:
    """[T, heads, D] x [T, kv_heads, D] -> [T, heads, V], by a mask of tokens x tokens."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if spec.sinks is not None:
        sinks = spec.sinks[:, None, None].expand(-1, len(query), 1)
        return torch.einsum("hqk,khd->qhd", torch.cat([scores, sinks], -1).softmax(-1)[..., :-1], value)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


def random_rows(
    tokens: int, heads: int, kv_heads: int, size: int, values: int, seed: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Query, key and value [tokens, heads, size] that ask for gradients, and a weight of each output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, size), (kv_heads, size), (kv_heads, values), (heads, values)]
    rows = [torch.randn(tokens, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [*(row.requires_grad_() for row in rows[:3]), rows[3]]


def largest_error(found: Tensor, wanted: Tensor, inputs: list[Tensor], weight: Tensor) -> float:
    """The largest difference of two outputs, and of their gradients with respect to the inputs."""
    pairs = [(found, wanted)]
    own, plain = (torch.autograd.grad((output * weight).sum(), inputs) for output in (found, wanted))
    pairs += zip(own, plain, strict=True)
    return max(float((left - right).detach().abs().max()) for left, right in pairs)
