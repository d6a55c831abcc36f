"""Attention in a forest of segments: shared prefixes and their continuations, as one packed row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from strop.models.attention.attention_plan import AttentionSpec
from strop.models.attention.blockwise_kernel import BlockwiseKernel
from strop.models.attention.flash_kernel import CpuFlashKernel, VarlenFlashKernel
from strop.models.attention.flex_kernel import FlexKernel
from strop.models.attention.kernel_choice import AttentionKernel, AttentionKernelName, choose_kernel, choose_piece_kernel
from strop.models.attention.merged_attention import PieceKernel, attend_in_pieces
from strop.models.attention.padded_families import PaddedFamilies
from strop.models.attention.tree_mixing import TreeMixing
from strop.models.attention.tree_pieces import AttentionPiece, Levels, TreeSegments
from strop.models.mixers.indexers import EVERYTHING, IndexRows, PathBlocks, bits_below, count_bytes
from strop.models.mixers.recurrence import MixerSpec, Recurrence, Rows

LAUNCHES = 8_000_000  # numbers of a level that take a GPU as long as the ten launches that gather rows of several families


@dataclass(frozen=True, eq=False, kw_only=True)
class TreeBlocks(PathBlocks):
    """The W complete blocks of a row of T tokens, for attention to their keys after those of the row."""

    ended: Tensor  # [T, bytes]: bitmap of the blocks that have ended at a token
    levels: Levels  # each query of a segment and each block that ends in the segment or above; keys are counted from T
    paths: Mapping[int, Tensor]  # segment -> the blocks on its path


class TreePlan:
    """Attention in a forest of segments: a token attends causally to its own segment and fully to its ancestors.

    A token's position is its distance from the root, so sliding windows follow from positions. A shared prefix is projected and stored
    once. ``kernel``: the attention kernel (``policy.attention_kernel``); auto chooses by device, dtype and length.
    """

    def __init__(
        self,
        segment_start: Tensor,
        segment_length: Tensor,
        segment_parent: Tensor,
        device: torch.device,
        kernel: AttentionKernel = "auto",
    ) -> None:
        columns = (segment_start, segment_length, segment_parent)
        self.segments = TreeSegments(*(column.tolist() for column in columns))
        self.device = device
        self.kernel = kernel
        self._kernels: dict[str, PieceKernel] = {}
        self._levels: dict[int | None, Levels] = {}
        self._paths: dict[int | None, Levels] = {}
        self._places: dict[int, Tensor] = {}
        self._blocks: dict[int, TreeBlocks] = {}

    @cached_property
    def families(self) -> PaddedFamilies:
        return PaddedFamilies(self.segments, self.device)

    @cached_property
    def mixing(self) -> TreeMixing:
        return TreeMixing(self.segments, self.device)

    @cached_property
    def longest(self) -> int:
        """The largest number of tokens on a path."""
        return max(position + self.segments.lengths[segment] for segment, _, position in self.segments.walk())

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64, of each token on its path."""
        found = torch.empty(sum(self.segments.lengths), dtype=torch.int64)
        for segment, _, position in self.segments.walk():
            start, length = self.segments.starts[segment], self.segments.lengths[segment]
            found[start : start + length] = torch.arange(position, position + length)
        return found.to(self.device)

    @cached_property
    def flex(self) -> FlexKernel:
        return FlexKernel(self.segments, self.device)

    def levels(self, window: int | None) -> Levels:
        """Return the pieces of the row for layers with a window; the same object for each of them."""
        if window not in self._levels:
            self._levels[window] = self.segments.levels(window)
        return self._levels[window]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention [T, heads, D] x [T, kv_heads, D] -> [T, heads, V]; with W keys more that are pooled of blocks."""
        spec = spec.drop_unused_window(self.longest)
        if spec.pooled:
            return self._attend_to_blocks(query, key, value, spec, self.blocks(spec.block))
        if spec.chosen is not None:
            spec = replace(spec, key_positions=self.positions // spec.block)
        kernel = (
            choose_piece_kernel(self.kernel, query, key, value, spec)
            if spec.chosen is not None and spec.chosen.dim() == 3
            else choose_kernel(self.kernel, query, key, value, spec, self.families.count_scores(query.shape[1]))
        )
        if kernel == "plain":
            return self.families.attend(query, key, value, spec)
        if kernel == "flex" and query.device.type != "cpu":
            return self.flex.attend(query, key, value, spec)
        pieces = self.flex if kernel == "flex" else self.piece_kernel(kernel, query.device)
        joined = kernel == "flash" and query.device.type != "cpu" and self._joins(query, key, spec.window)
        levels = self.paths(spec.window) if joined else self.levels(spec.window)
        return attend_in_pieces(query, key, value, pieces, levels, spec)

    def _attend_to_blocks(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, blocks: TreeBlocks) -> Tensor:
        """Attention to tokens within the window and to blocks that have ended, by a choice whose first byte is of the former."""
        chosen = blocks.ended if spec.chosen is None else blocks.ended & spec.chosen
        chosen = torch.cat([chosen.new_full((len(chosen), 1), EVERYTHING), chosen], 1)
        key_positions = torch.cat([torch.zeros_like(self.positions), blocks.index + 8])
        spec = replace(spec, chosen=chosen, key_positions=key_positions)
        kernel = self.piece_kernel(choose_piece_kernel(self.kernel, query, key, value, spec), query.device)
        return attend_in_pieces(query, key, value, kernel, (*self.levels(spec.window), *blocks.levels), spec)

    def blocks(self, size: int) -> TreeBlocks:
        """Return the complete blocks of ``size`` tokens of each path; the same object for each layer."""
        if size not in self._blocks:
            self._blocks[size] = find_blocks(self.segments, size, self._path, self.positions, self.longest)
        return self._blocks[size]

    def paths(self, window: int | None) -> Levels:
        """Return the row as one level, for layers with a window; the same object for each of them."""
        if window not in self._paths:
            self._paths[window] = self.segments.paths(window)
        return self._paths[window]

    def _joins(self, query: Tensor, key: Tensor, window: int | None) -> bool:
        """Return whether a GPU computes a row as one call with the keys of each path gathered, and not level by level.

        A window needs it: how far a query sees into a level depends on its segment. Otherwise the fewer numbers moved: of keys and values,
        gathered in both passes and their gradients added, against those of merged queries and outputs.
        """
        merged, gathered, families = self._moved
        moved = 2 * gathered * key.shape[1] * key.shape[2] - merged * query.shape[1] * query.shape[2]
        return window is not None or (merged > 0 and moved <= (LAUNCHES if families > 1 else 0))

    @cached_property
    def _moved(self) -> tuple[int, int, int]:
        """The rows of queries that are merged level by level, those of keys that are gathered in one call, and the families."""
        upper = [piece for level in self.levels(None)[1:] for piece in level]
        return sum(piece.queries for piece in upper), sum(piece.keys for piece in self.paths(None)[0]), len(upper)

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, spec: MixerSpec) -> Tensor:
        """Causal depthwise convolution along each path: [T, C] and weight [C, k] -> [T, C]."""
        return self.mixing.convolve(inputs, weight, bias)

    def scan(self, recurrence: Recurrence, rows: Rows, spec: MixerSpec) -> Tensor:
        """A recurrence along each path; a segment starts from the last state of its parent."""
        return self.mixing.scan(recurrence, rows)

    def choose(self, rows: IndexRows, layer: int, first: int = 0) -> Tensor:
        """The choice of an indexer among each token's path. ``first``: the token of the row that is the first query of ``rows``."""
        if self.longest <= rows.count * rows.block:
            return rows.choose_everything()
        count, width = len(rows.query), rows.count_bytes(self.longest)
        size = rows.block if rows.pooled else 1  # tokens of a key
        chosen = torch.full((count, *rows.choices, width), EVERYTHING, dtype=torch.int8, device=rows.query.device)
        for segment, _, position in self.segments.walk():
            offset = self.segments.starts[segment] - position  # of the segment's places in the row from its positions
            low = max(position, first - offset, rows.count * rows.block)
            high = min(position + self.segments.lengths[segment], first + count - offset)
            if low < high:
                own = slice(low + offset - first, high + offset - first)
                part = replace(rows, query=rows.query[own], weight=rows.weight[own])
                path = self.blocks(size).paths[segment] if rows.pooled else self._path(segment)
                newest = torch.arange(low + 1, high + 1, device=self.device) // size - 1
                chosen[own] = part.choose(newest, rows.key.index_select(0, path[: high // size])[None], width)
        return chosen

    def _path(self, segment: int) -> Tensor:
        """[P] int64: the places in the row of the tokens from the root to the end of a segment."""
        if segment not in self._places:
            start, length = self.segments.starts[segment], self.segments.lengths[segment]
            own = torch.arange(start, start + length, device=self.device)
            parent = self.segments.parents[segment]
            self._places[segment] = own if parent == -1 else torch.cat([self._path(parent), own])
        return self._places[segment]

    def piece_kernel(self, name: AttentionKernelName, device: torch.device) -> PieceKernel:
        """Return the kernel that computes pieces of a row, ``flash`` or ``blockwise``; the same one for each layer."""
        if name not in self._kernels:
            flash = CpuFlashKernel if device.type == "cpu" else VarlenFlashKernel
            self._kernels[name] = flash() if name == "flash" else BlockwiseKernel()
        return self._kernels[name]


def find_blocks(
    segments: TreeSegments, size: int, path_of: Callable[[int], Tensor], positions: Tensor, longest: int
) -> TreeBlocks:
    """``path_of``: segment -> the places in the row of the tokens from the root to its end. ``positions`` [T] on their paths."""
    places, index, before = [], [], []
    paths: dict[int, Tensor] = {-1: positions.new_empty(0)}
    ranges: dict[int, tuple[int, int]] = {}  # the start of a segment in the row -> its first block, and how many end in it
    total = 0
    for segment, _, position in segments.walk():
        length, above = segments.lengths[segment], paths[segments.parents[segment]]
        first, last = position // size, (position + length) // size
        own = torch.arange(total, total + last - first, device=positions.device)
        paths[segment] = torch.cat([above, own])
        if length:
            ranges[segments.starts[segment]] = total, last - first
        if last > first:
            places.append(path_of(segment)[first * size : last * size].view(-1, size))
            index.append(torch.arange(first, last, device=positions.device))
            before.append(torch.cat([own.new_full((1,), -1), paths[segment]])[first:last])
            total += last - first
    count, empty = len(positions), positions.new_empty(0)
    pieces = (
        [AttentionPiece(each.query, each.queries, count + ranges[each.key][0], ranges[each.key][1]) for each in level]
        for level in segments.levels()
    )
    levels = tuple(tuple(piece for piece in level if piece.keys) for level in pieces)
    return TreeBlocks(
        size=size,
        places=torch.cat([empty.view(0, size), *places]),
        index=torch.cat([empty, *index]),
        before=torch.cat([empty, *before]),
        ended=bits_below((positions + 1) // size, count_bytes(-(-longest // size))),
        levels=levels,
        paths=paths,
    )
