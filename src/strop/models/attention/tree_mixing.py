"""Convolutions and recurrences in a forest of segments: each path from a root is a sequence, and shared segments are computed once.

A segment starts from the last state of its parent. Segments of a depth are computed together, one depth after the other, and the
gradients of states flow back into the parents. A convolution needs no depths: it is computed over the whole row, and again for
the first tokens of each segment, whose inputs are those before them on their path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from strop.models.attention.padded_families import move_rows
from strop.models.attention.tree_pieces import TreeSegments
from strop.models.mixers.recurrence import Recurrence, Rows

SHORTEST_SHARE = 0.5  # of the longest segment, for those that are padded to it
SHORT = 64  # tokens; segments up to this length are padded together


@dataclass(frozen=True, eq=False)
class SegmentBatch:
    """Segments of one depth that are padded to a common length."""

    tokens: int
    count: int
    longest: int
    padded_index: Tensor | None  # [tokens] int64: places in [count * longest]; None without padding
    parents: Tensor | None  # [count] int64: places among the kept states of the depth above; None: roots
    kept: Tensor | None  # int64: those of its states from which others start; None: all

    def pad(self, rows: Tensor) -> Tensor:
        if self.padded_index is not None:
            rows = move_rows(rows, None, self.padded_index, self.count * self.longest)
        padded: Tensor = rows.unflatten(0, (self.count, self.longest))  # type: ignore[no-untyped-call]
        return padded

    def unpad(self, padded: Tensor) -> Tensor:
        flat = padded.flatten(0, 1)
        return flat if self.padded_index is None else move_rows(flat, self.padded_index, None)


class TreeMixing:
    """The mixers' part of a ``TreePlan``."""

    def __init__(self, segments: TreeSegments, device: torch.device) -> None:
        self.segments = segments
        self.device = device
        self._first_tokens: dict[int, tuple[Tensor, Tensor]] = {}

    def scan(self, recurrence: Recurrence, rows: Rows) -> Tensor:
        order, depths = self.depths
        if order is not None:
            rows = [move_rows(each, order, None) for each in rows]
        split = zip(*(each.split([batch.tokens for depth in depths for batch in depth]) for each in rows), strict=True)
        outputs: list[Tensor] = []
        above: Tensor | None = None
        for depth in depths:
            kept: list[Tensor] = []
            for batch in depth:
                states = None if batch.parents is None or above is None else above.index_select(0, batch.parents)
                output, states = recurrence([batch.pad(each) for each in next(split)], states)
                outputs.append(batch.unpad(output))
                kept.append(states if batch.kept is None else states.index_select(0, batch.kept))
            above = kept[0] if len(kept) == 1 else torch.cat(kept)
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output if order is None else move_rows(output, None, order)

    @cached_property
    def depths(self) -> tuple[Tensor | None, list[list[SegmentBatch]]]:
        """The permutation of the row's tokens by batch (None if they are in that order), and the batches of each depth."""
        starts, lengths = self.segments.starts, self.segments.lengths
        parents, levels = self._levels()
        starting = set(parents.values())  # segments from which others start
        places: dict[int, int] = {}  # of a segment among the kept states of its depth
        ordered: list[int] = []
        depths: list[list[SegmentBatch]] = []
        for level in levels:
            batches, offset = [], 0
            for members in group_by_length(level, lengths):
                kept = [place for place, segment in enumerate(members) if segment in starting]
                above = None if parents[members[0]] == -1 else [places[parents[segment]] for segment in members]
                batches.append(self._batch([lengths[segment] for segment in members], above, kept))
                places |= {members[place]: offset + number for number, place in enumerate(kept)}
                offset += len(kept)
                ordered += members
            depths.append(batches)
        order = torch.cat([torch.arange(starts[segment], starts[segment] + lengths[segment]) for segment in ordered])
        in_order = torch.equal(order, torch.arange(len(order)))
        return None if in_order else order.to(self.device), depths

    def _levels(self) -> tuple[dict[int, int], list[list[int]]]:
        """The parent of each segment with tokens (its nearest ancestor that has some, or -1), and these segments by depth."""
        nearest: dict[int, int] = {-1: -1}  # a segment, or its nearest ancestor with tokens
        depth_of: dict[int, int] = {-1: -1}
        parents: dict[int, int] = {}
        levels: list[list[int]] = []
        for segment, _, _ in self.segments.walk():
            parent = nearest[self.segments.parents[segment]]
            if not self.segments.lengths[segment]:
                nearest[segment] = parent
                continue
            nearest[segment], parents[segment], depth_of[segment] = segment, parent, depth_of[parent] + 1
            if depth_of[segment] == len(levels):
                levels.append([])
            levels[depth_of[segment]].append(segment)
        return parents, levels

    def _batch(self, lengths: list[int], parents: list[int] | None, kept: list[int]) -> SegmentBatch:
        longest = max(lengths)
        real = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
        padded = None if bool(real.all()) else real.flatten().nonzero().squeeze(1).to(self.device)
        above = None if parents is None else torch.tensor(parents, device=self.device)
        index = None if len(kept) == len(lengths) else torch.tensor(kept, dtype=torch.int64, device=self.device)
        return SegmentBatch(sum(lengths), len(lengths), longest, padded, above, index)

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[T, C] and [C, k] -> [T, C]"""
        size = weight.shape[1]
        inputs = inputs.to(weight.dtype)
        row = F.conv1d(inputs.T[None], weight.unsqueeze(1), bias, padding=size - 1, groups=weight.shape[0])
        outputs = row[0, :, : len(inputs)].T
        if size == 1:
            return outputs
        first, before = self.first_tokens(size)
        padded = torch.cat([inputs.new_zeros(1, inputs.shape[1]), inputs])
        window = padded.index_select(0, before.flatten()).unflatten(0, before.shape)  # [F, k, C]
        again = (window * weight.T).sum(1)
        again = again if bias is None else again + bias
        return outputs.index_copy(0, first, again.to(outputs.dtype))

    def first_tokens(self, size: int) -> tuple[Tensor, Tensor]:
        """[F] the tokens of the row with fewer than ``size`` - 1 tokens of their segment before them, and [F, size] one more than
        the places of the inputs of their convolution; 0 for those before a root.
        """
        if size not in self._first_tokens:
            first: list[int] = []
            before: list[Sequence[int]] = []
            tails: dict[int, list[int]] = {-1: [-1] * (size - 1)}
            for segment, _, _ in self.segments.walk():
                start, length = self.segments.starts[segment], self.segments.lengths[segment]
                own = list(range(start, start + min(length, size - 1)))
                path = tails[self.segments.parents[segment]] + own
                first += own
                before += [path[place : place + size] for place in range(len(own))]
                tails[segment] = (path if length < size else list(range(start + length - size + 1, start + length)))[1 - size :]
            places = torch.tensor(before, dtype=torch.int64, device=self.device) + 1
            self._first_tokens[size] = torch.tensor(first, dtype=torch.int64, device=self.device), places
        return self._first_tokens[size]


def group_by_length(level: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Segments whose lengths are near enough to pad them to the longest."""
    groups: list[list[int]] = []
    for segment in sorted(level, key=lambda each: -lengths[each]):
        longest = lengths[groups[-1][0]] if groups else 0
        if not groups or (longest > SHORT and lengths[segment] < SHORTEST_SHARE * longest):
            groups.append([])
        groups[-1].append(segment)
    return groups
