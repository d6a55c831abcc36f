"""Attention of the learner's packed rows in ``exact_attention``'s order: each segment reads the keys of its path, by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strop.models.attention.attention_plan import AttentionSpec
from strop.models.exact.exact_attention import KEY_BLOCK, exact_attention


@dataclass(frozen=True, eq=False)
class _Siblings:
    """Segments with the same parent, padded to the longest."""

    queries: Tensor  # [C, L] int64: rows of the batch; row 0 for padding
    keys: Tensor  # [C, S] int64: rows of the path, by position, S a multiple of the block of keys
    positions: Tensor  # [1, L]
    real: Tensor  # [C, L] bool


class ExactTree:
    """Attention in a forest of segments: a token attends causally to its own segment and fully to its ancestors."""

    def __init__(self, segment_start: Tensor, segment_length: Tensor, segment_parent: Tensor, device: torch.device) -> None:
        starts, lengths, parents = (column.tolist() for column in (segment_start, segment_length, segment_parent))
        members: dict[int, list[int]] = {}
        for segment, parent in enumerate(parents):
            if lengths[segment]:
                members.setdefault(parent, []).append(segment)
        paths: dict[int, Tensor] = {-1: torch.zeros(0, dtype=torch.int64)}  # segment -> rows from the root to its end

        def path(segment: int) -> Tensor:
            if segment not in paths:
                own = torch.arange(starts[segment], starts[segment] + lengths[segment])
                paths[segment] = torch.cat([path(parents[segment]), own])
            return paths[segment]

        self.families = [
            _make_siblings([path(segment) for segment in segments], len(path(parent)), device)
            for parent, segments in members.items()
        ]
        rows = torch.cat([family.queries[family.real] for family in self.families])
        self.order = torch.argsort(rows)  # from the rows of all families to those of the batch

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Compute attention: query [T, heads, D], key and value [T, kv_heads, D] -> [T, heads, D]."""
        outputs = []
        for family in self.families:
            queries, keys, values = (
                tensor.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
                for tensor, index in ((query, family.queries), (key, family.keys), (value, family.keys))
            )
            output = exact_attention(queries, keys, values, family.positions, spec)
            outputs.append(output.transpose(1, 2)[family.real])
        return torch.cat(outputs).index_select(0, self.order)


def _make_siblings(paths: list[Tensor], prefix: int, device: torch.device) -> _Siblings:
    """``paths``: rows of each segment's path, of which the first ``prefix`` are shared."""
    longest = max(len(path) for path in paths)
    span = -(-longest // KEY_BLOCK) * KEY_BLOCK
    rows = torch.zeros(len(paths), span, dtype=torch.int64)
    for index, path in enumerate(paths):
        rows[index, : len(path)] = path
    positions = torch.arange(prefix, longest)
    real = positions[None] < torch.tensor([len(path) for path in paths])[:, None]
    return _Siblings(*(tensor.to(device) for tensor in (rows[:, prefix:longest], rows, positions[None], real)))
