"""Attention by torch's fused kernels, which return the log-sum-exp of their scores: no padding, and no mask.

On a CPU a kernel is called for each piece; consecutive causal squares of equal size are one call. On a GPU a call has sequences of
different lengths (varlen). Either each level of the tree is one: all segments among themselves, then everything that attends to the roots,
and so on. Or the whole row is one, in which the keys of a segment's ancestors are gathered before its own: with a sliding window, and where
it moves fewer numbers than merging levels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from strop.device_copies import is_gpu, move_fields
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.attention.flash_libraries import VarlenSequences, choose_library, describe_missing_cap
from strop.models.attention.merged_attention import Gradients, merge_part, merge_rows
from strop.models.attention.tree_pieces import AttentionPiece, Levels
from strop.sampling import at_least_float32

aten: Any = torch.ops.aten

LARGEST_HEAD = 256  # of the GPU kernels


def flash_obstacle(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> str | None:
    """Return why the fused kernels cannot compute this attention; None if they can."""
    size, values = query.shape[2], value.shape[2]
    if spec.chosen is not None:
        return "an indexer chooses the keys of each query"
    if query.device.type == "cpu":
        if spec.window is not None:
            return "the layer has a sliding window"
        if spec.softcap is not None:
            return "the layer caps its scores"
        known = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        return (
            None
            if query.dtype in known and size >= values
            else f"a CPU has none for {query.dtype} with heads of {size}, {values}"
        )
    if not is_gpu(query.device):
        return f"there are none for {query.device.type}"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"a GPU has none for {query.dtype}"
    if size != values or size % 8 or size > LARGEST_HEAD:
        return f"they need heads of one size, a multiple of 8 up to {LARGEST_HEAD}, and these have {size} and {values}"
    return None if choose_library(query, key, spec) else describe_missing_cap(query.device)


@dataclass(frozen=True, eq=False)
class _Call:
    """Pieces of equal size computed by one call as a batch: consecutive rows of queries, and of keys."""

    rows: slice
    columns: slice
    count: int
    causal: bool


class CpuFlashKernel:
    """A ``PieceKernel`` (strop.models.attention.merged_attention) for pieces that are causal squares or have no mask."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, levels: Levels, spec: AttentionSpec, *, final: bool
    ) -> tuple[Tensor, Tensor]:
        values = pad(value, (0, query.shape[2] - value.shape[2]))
        output = at_least_float32(query.new_zeros(query.shape))
        lse = at_least_float32(query.new_full(query.shape[:2], float("-inf")))
        for call in _batch_pieces(levels):
            batch = [_to_batch(row, part, call.count) for row, part in _parts(call, query, key, values)]
            part, part_lse = aten._scaled_dot_product_flash_attention_for_cpu(*batch, 0.0, call.causal, scale=spec.scale)
            part, part_lse = _to_rows(part), part_lse.transpose(1, 2).flatten(0, 1)
            if call.causal:  # the first part of these rows
                output[call.rows], lse[call.rows] = part, part_lse
            else:
                merge_part(output[call.rows], lse[call.rows], part, part_lse)
        return output[..., : value.shape[2]], lse

    def backward(
        self, rows: Gradients, output: Tensor, lse: Tensor, grad: Tensor, levels: Levels, spec: AttentionSpec, *, final: bool
    ) -> Gradients:
        query, key, value = rows
        missing = query.shape[2] - value.shape[2]
        values, output, grad = (pad(tensor, (0, missing)) for tensor in (value, output, grad))
        grads = tuple(at_least_float32(torch.zeros_like(tensor)) for tensor in (query, key, values))
        for call in _batch_pieces(levels):
            batch = [_to_batch(row, part, call.count) for row, part in _parts(call, query, key, values)]
            out, arriving = (_to_batch(tensor, call.rows, call.count) for tensor in (output, grad))
            total = lse[call.rows].unflatten(0, (call.count, -1)).transpose(1, 2)
            parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                arriving, *batch, out, total, 0.0, call.causal, scale=spec.scale
            )
            for (whole, place), part in zip(_parts(call, *grads), parts, strict=True):
                whole[place] += _to_rows(part)
        return grads[0], grads[1], grads[2][..., : value.shape[2]]


def _parts(call: _Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[tuple[Tensor, slice], ...]:
    return (query, call.rows), (key, call.columns), (value, call.columns)


def _batch_pieces(levels: Levels) -> Iterator[_Call]:
    """Yield the calls that compute the pieces; consecutive causal squares of equal size are one call."""
    for piece in (piece for level in levels for piece in level if not piece.causal):
        assert piece.distance is None, "a window, which fused kernels do not have"
    squares = [piece for level in levels for piece in level if piece.causal]
    for run in _runs(squares):
        yield _make_call(run, causal=True)
    for piece in (piece for level in levels for piece in level if not piece.causal):
        yield _make_call([piece], causal=False)


def _make_call(pieces: list[AttentionPiece], *, causal: bool) -> _Call:
    first, last = pieces[0], pieces[-1]
    rows, columns = slice(first.query, last.query + last.queries), slice(first.key, last.key + last.keys)
    return _Call(rows, columns, len(pieces), causal)


def _runs(pieces: Iterable[AttentionPiece]) -> Iterator[list[AttentionPiece]]:
    run: list[AttentionPiece] = []
    for piece in pieces:
        if run and not _follows(run[-1], piece):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _follows(before: AttentionPiece, after: AttentionPiece) -> bool:
    rows, columns = before.query + before.queries == after.query, before.key + before.keys == after.key
    return rows and columns and before.queries == after.queries


def _to_batch(tensor: Tensor, rows: slice, count: int) -> Tensor:
    """Rows of [T, heads, D] -> [count, heads, L, D]"""
    batch: Tensor = tensor[rows].unflatten(0, (count, -1))  # type: ignore[no-untyped-call]
    return batch.transpose(1, 2)


def _to_rows(batch: Tensor) -> Tensor:
    """[count, heads, L, D] -> [count * L, heads, D]"""
    return batch.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class _VarlenCall:
    """The pieces of a level as the sequences of one call; pieces that have the same queries are one sequence."""

    rows: Tensor | slice  # of the queries, sequence by sequence
    columns: Tensor | slice
    query_ends: Tensor  # [sequences + 1] int32: the start of each sequence, and the end of the last
    key_ends: Tensor
    longest: tuple[int, int]
    causal: bool
    covered: int  # rows of the queries, each in one sequence
    repeats: bool  # a key is in several sequences

    @property
    def sequences(self) -> VarlenSequences:
        return VarlenSequences(self.query_ends, self.key_ends, self.longest, self.causal)


class VarlenFlashKernel:
    """A ``PieceKernel`` (strop.models.attention.merged_attention) on a GPU, for pieces that are causal squares or have no mask."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Levels, list[_VarlenCall]]] = {}  # by the id of the levels, which all layers share

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, levels: Levels, spec: AttentionSpec, *, final: bool
    ) -> tuple[Tensor, Tensor]:
        calls, library = self._calls(levels, query.device), choose_library(query, key, spec)
        assert library is not None, "checked by flash_obstacle"
        output: Tensor | None = None
        for call in calls:
            rows = (_take(query, call.rows), _take(key, call.columns), _take(value, call.columns))
            part, part_lse = library.forward(rows, call.sequences, spec)
            if output is None:  # of at most two parts the sum needs no wider dtype than its result
                part = part if final and len(calls) <= 2 else at_least_float32(part)
                output, lse = _place(part, part_lse, call, len(query))
            else:
                merge_rows(output, lse, part, part_lse, call.rows)
        assert output is not None, "attention without keys"
        return output, lse.t()

    def backward(
        self, rows: Gradients, output: Tensor, lse: Tensor, grad: Tensor, levels: Levels, spec: AttentionSpec, *, final: bool
    ) -> Gradients:
        query, key, value = rows
        calls, totals, library = self._calls(levels, grad.device), lse.t(), choose_library(query, key, spec)
        assert library is not None, "checked by flash_obstacle"
        narrow = final and len(calls) <= 2 and not any(call.repeats for call in calls)
        own: Sequence[Tensor] = ()  # the gradient of the queries
        others: Sequence[Tensor] = ()  # those of keys and values
        for call in calls:
            taken = (_take(query, call.rows), _take(key, call.columns), _take(value, call.columns))
            whole = (_take(output, call.rows), _take(totals, call.rows, 1).contiguous())
            parts = library.backward(_take(grad, call.rows), taken, *whole, call.sequences, spec)
            last = final and len(calls) == 1
            own = _add_rows(own, parts[:1], call.rows, query, narrow or last, last)
            others = _add_rows(others, parts[1:], call.columns, key, narrow, last)
        assert own and others, "attention without keys"
        return own[0], others[0], others[1]

    def _calls(self, levels: Levels, device: torch.device) -> list[_VarlenCall]:
        if id(levels) not in self._made:
            calls = [
                _make_varlen([piece for piece, _ in pieces], causal)
                for level in levels
                for causal, pieces in groupby(_sequences(level), lambda each: each[1])
            ]
            self._made[id(levels)] = levels, move_fields(calls, device)
        return self._made[id(levels)][1]


def _take(tensor: Tensor, place: Tensor | slice, dimension: int = 0) -> Tensor:
    """Return some rows: all of them are no launch, and neither are consecutive ones."""
    if isinstance(place, Tensor):
        return tensor.index_select(dimension, place)
    return tensor[place] if dimension == 0 else tensor[:, place]


def _is_whole(place: Tensor | slice, tensor: Tensor) -> bool:
    return isinstance(place, slice) and place.stop - place.start == len(tensor)


def _place(part: Tensor, lse: Tensor, call: _VarlenCall, rows: int) -> tuple[Tensor, Tensor]:
    """Return the first part of [rows, heads, V] and [heads, rows]: nothing is copied if it is in order, and all of it."""
    if _is_whole(call.rows, part) and call.covered == rows:
        return part, lse
    blank = call.covered < rows
    output = part.new_zeros(rows, *part.shape[1:]) if blank else part.new_empty(rows, *part.shape[1:])
    whole = lse.new_full((len(lse), rows), float("-inf")) if blank else lse.new_empty(len(lse), rows)
    output[call.rows], whole[:, call.rows] = part, lse
    return output, whole


def _add_rows(
    sums: Sequence[Tensor], parts: Sequence[Tensor], place: Tensor | slice, rows: Tensor, narrow: bool, last: bool
) -> Sequence[Tensor]:
    """Add parts of one shape to the sums of some rows, or begin the sums with them. ``narrow``: at most two numbers are added, so that
    the sum needs no wider dtype; ``last``: nothing is added any more.
    """
    if not sums and _is_whole(place, rows):
        return [part if narrow else at_least_float32(part) for part in parts]
    if not sums:
        blank = at_least_float32(torch.zeros((), dtype=rows.dtype)).dtype
        begun = torch.zeros(len(parts), *rows.shape, dtype=blank, device=rows.device)
        added = torch.stack(list(parts))  # one launch for all of them
        if isinstance(place, slice):
            begun[:, place] = added
        else:
            begun.index_add_(1, place, added.to(blank))
        return (begun.to(rows.dtype) if last else begun).unbind(0)
    for whole, part in zip(sums, parts, strict=True):
        if isinstance(place, slice):
            whole[place].add_(part)  # += would also copy the sum to where it is
        else:
            whole.index_add_(0, place, part.to(whole.dtype))
    return sums


def _sequences(level: Sequence[AttentionPiece]) -> Iterator[tuple[list[AttentionPiece], bool]]:
    """Yield the pieces of each sequence, and whether its queries are the last of its keys, which they see causally."""
    for _, pieces in groupby(level, lambda piece: (piece.query, piece.queries)):
        joined = list(pieces)
        assert all(piece.causal or piece.distance is None for piece in joined), "a part of a window"
        yield joined, joined[-1].causal


def _make_varlen(sequences: Sequence[Sequence[AttentionPiece]], causal: bool) -> _VarlenCall:
    rows = [(pieces[0].query, pieces[0].queries) for pieces in sequences]
    keys = [sum(piece.keys for piece in pieces) for pieces in sequences]
    lengths = [length for _, length in rows]
    ends = [torch.tensor(list(accumulate(sizes, initial=0)), dtype=torch.int32) for sizes in (lengths, keys)]
    columns = _gather([(piece.key, piece.keys) for pieces in sequences for piece in pieces])
    repeats = not isinstance(columns, slice) and len(columns.unique()) < len(columns)
    return _VarlenCall(_gather(rows), columns, ends[0], ends[1], (max(lengths), max(keys)), causal, sum(lengths), repeats)


def _gather(ranges: list[tuple[int, int]]) -> Tensor | slice:
    """Return the rows of consecutive ranges (first, count): a slice if the ranges are adjacent, otherwise indices."""
    if all(first + count == after for (first, count), (after, _) in pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][0] + ranges[-1][1])
    return torch.cat([torch.arange(first, first + count) for first, count in ranges])
