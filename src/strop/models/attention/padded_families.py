"""Attention of families of segments, padded to the longest segment: one call per family, with a dense mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from strop.device_copies import move
from strop.models.attention.attention_plan import AttentionSpec, causal_mask, masked_attention
from strop.models.attention.tree_pieces import TreeSegments
from strop.models.mixers.indexers import EVERYTHING, sees


@dataclass(frozen=True, eq=False)
class SiblingSegments:
    """Segments with the same parent, padded to a common length for a single attention call."""

    count: int
    max_length: int
    padded_index: Tensor | None  # [tokens] int64: index of each token in the padded [count * max_length]; None without padding
    prefix: tuple[tuple[int, int, int], ...]  # shared prefix, in order: (family, first, last + 1) of each ancestor

    @property
    def prefix_length(self) -> int:
        return sum(last - first for _, first, last in self.prefix)


class PaddedFamilies:
    """Attention of each family of segments with one parent: they are padded to the longest, and their prefix is repeated.

    The cost is that of the real tokens plus padding and repeated prefixes. Suited to short sequences, for which it makes few
    calls.
    """

    def __init__(self, segments: TreeSegments, device: torch.device) -> None:
        starts, lengths, parents = segments.starts, segments.lengths, segments.parents
        members: dict[int, list[int]] = {}
        for segment, parent in enumerate(parents):
            if lengths[segment]:
                members.setdefault(parent, []).append(segment)
        ranges = {  # segment -> (family, first, last + 1) among the family's tokens
            segment: (
                family,
                sum(lengths[other] for other in segments[:index]),
                sum(lengths[other] for other in segments[: index + 1]),
            )
            for family, segments in enumerate(members.values())
            for index, segment in enumerate(segments)
        }
        self.families = [
            _make_siblings([lengths[segment] for segment in segments], _ancestors(parent, parents, ranges))
            for parent, segments in members.items()
        ]
        self.device = device
        self.sizes = [sum(lengths[segment] for segment in segments) for segments in members.values()]
        ordered = [segment for segments in members.values() for segment in segments]
        order = torch.cat([torch.arange(starts[segment], starts[segment] + lengths[segment]) for segment in ordered])
        in_order = torch.equal(order, torch.arange(len(order)))
        self._order = None if in_order else order
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    @cached_property
    def placed(self) -> tuple[Tensor | None, list[SiblingSegments]]:
        """On the device: the permutation that groups the row's tokens by family (None if already grouped), and the families."""
        tensors = [self._order, *(each.padded_index for each in self.families)]
        moved = iter(move([each for each in tensors if each is not None], self.device))
        order, *indices = (None if each is None else next(moved) for each in tensors)
        return order, [replace(each, padded_index=index) for each, index in zip(self.families, indices, strict=True)]

    def count_scores(self, heads: int) -> int:
        """Return the number of scores of the largest family in a layer, including padding."""
        return max(heads * each.count * each.max_length * (each.prefix_length + each.max_length) for each in self.families)

    def _mask(self, queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
        shape = (queries, keys, window)
        if shape not in self._masks:
            self._masks[shape] = causal_mask(*shape, device)
        return self._masks[shape]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        order, families = self.placed
        if order is not None:
            query, key, value = (move_rows(tensor, order, None) for tensor in (query, key, value))
        queries, keys, values = (tensor.split(self.sizes) for tensor in (query, key, value))
        chosen = None if spec.chosen is None else spec.chosen if order is None else spec.chosen.index_select(0, order)
        choices = [None] * len(families) if chosen is None else chosen.split(self.sizes)
        outputs = [
            self._attend_family(
                family,
                queries[index],
                (keys[index], _gather_prefix(family, keys)),
                (values[index], _gather_prefix(family, values)),
                replace(spec, chosen=choices[index]),
            )
            for index, family in enumerate(families)
        ]
        output: Tensor = torch.cat(outputs)
        if order is not None:
            output = move_rows(output, None, order)
        return output

    def _attend_family(
        self,
        family: SiblingSegments,
        query: Tensor,
        key: tuple[Tensor, Tensor | None],
        value: tuple[Tensor, Tensor | None],
        spec: AttentionSpec,
    ) -> Tensor:
        span = family.prefix_length + family.max_length
        spec = spec.drop_unused_window(span)
        keys, values = (_prepend_prefix(_pad(tensor, family), prefix) for tensor, prefix in (key, value))
        causal = not family.prefix and spec.window is None and spec.chosen is None
        mask = None if causal else self._mask(family.max_length, span, spec.window, query.device)
        if mask is not None and spec.chosen is not None:
            mask = mask & _see_chosen(family, spec.chosen, spec.block)
        output = masked_attention(_pad(query, family), keys, values, mask, spec, causal=causal)
        flat = output.transpose(1, 2).flatten(0, 1)
        return flat if family.padded_index is None else move_rows(flat, family.padded_index, None)


def _make_siblings(lengths: list[int], prefix: tuple[tuple[int, int, int], ...]) -> SiblingSegments:
    longest = max(lengths)
    real = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    padded_index = None if bool(real.all()) else real.flatten().nonzero().squeeze(1)
    return SiblingSegments(len(lengths), longest, padded_index, prefix)


def _ancestors(segment: int, parents: Sequence[int], ranges: dict[int, tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Return the ranges of a segment and its ancestors, from the root down; empty segments are skipped."""
    path: list[tuple[int, int, int]] = []
    while segment != -1:
        if segment in ranges:
            path.insert(0, ranges[segment])
        segment = parents[segment]
    return tuple(path)


def _gather_prefix(family: SiblingSegments, tensors: Sequence[Tensor]) -> Tensor | None:  # [P, heads, D]
    parts = [tensors[index][first:last] for index, first, last in family.prefix]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else None


def _pad(flat: Any, family: SiblingSegments) -> Tensor:
    """[tokens, heads, D] -> [count, heads, max_length, D], padded with zeros."""
    if family.padded_index is not None:
        flat = move_rows(flat, None, family.padded_index, family.count * family.max_length)
    padded: Tensor = flat.unflatten(0, (family.count, family.max_length))
    return padded.transpose(1, 2)


def _see_chosen(family: SiblingSegments, chosen: Tensor, block: int) -> Tensor:
    """[tokens, bytes] -> [count, 1, max_length, keys] bool; padding attends to everything, because a query needs a key."""
    if family.padded_index is not None:
        padded = chosen.new_full((family.count * family.max_length, chosen.shape[1]), EVERYTHING)
        chosen = padded.index_copy_(0, family.padded_index, chosen)
    positions = torch.arange(family.prefix_length + family.max_length, device=chosen.device) // block
    return sees(chosen, positions).view(family.count, 1, family.max_length, -1)


def _prepend_prefix(tensor: Tensor, prefix: Tensor | None) -> Tensor:
    """Prepend the prefix [P, heads, D], the same for all C, to [C, heads, L, D] -> [C, heads, P + L, D]."""
    if prefix is None:
        return tensor
    return torch.cat([prefix.transpose(0, 1).expand(len(tensor), -1, -1, -1), tensor], dim=2)


# Moves rows of a tensor without the accumulation in ``index_select``'s backward pass.


class _MoveRows(torch.autograd.Function):
    """Take the rows ``source``, or put rows at the indices ``target`` of ``size`` rows of zeros. Indices do not repeat.

    Each operation is the backward pass of the other, and a plain copy.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor | None, target: Tensor | None, size: int | None = None) -> Tensor:
        ctx.source, ctx.target, ctx.size = source, target, len(rows)
        return _take_rows(rows, source) if source is not None else _put_rows(rows, target, size or len(rows))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        moved = _put_rows(grad, ctx.source, ctx.size) if ctx.source is not None else _take_rows(grad, ctx.target)
        return moved, None, None, None


def move_rows(rows: Tensor, source: Tensor | None, target: Tensor | None, size: int | None = None) -> Tensor:
    apply: Any = _MoveRows.apply
    moved: Tensor = apply(rows, source, target, size)
    return moved


def _take_rows(rows: Tensor, index: Tensor) -> Tensor:
    return rows.index_select(0, index)


def _put_rows(rows: Tensor, index: Tensor | None, size: int) -> Tensor:
    assert index is not None
    return rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, index, rows)
