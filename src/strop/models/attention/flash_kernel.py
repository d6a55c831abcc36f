"""Attention by torch's fused kernels, which return the log-sum-exp of their scores: no padding, and no mask.

On a CPU a kernel is called for each piece; consecutive causal squares of equal size are one call. On a GPU each level of the tree
is one call with sequences of different lengths (varlen): all segments among themselves, then everything that attends to the roots, and so
on.
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
from strop.models.attention.merged_attention import Gradients, merge_part, merge_rows
from strop.models.attention.tree_pieces import AttentionPiece, Levels
from strop.sampling import at_least_float32

aten: Any = torch.ops.aten

LARGEST_HEAD = 256  # of the GPU kernels


def flash_obstacle(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> str | None:
    """Return why the fused kernels cannot compute this attention; None if they can."""
    if spec.window is not None:
        return "the layer has a sliding window"
    if spec.softcap is not None:
        return "the layer caps its scores"
    size, values = query.shape[2], value.shape[2]
    if query.device.type == "cpu":
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
    return None


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
class _VarlenLevel:
    """The pieces of a level as the sequences of one call."""

    rows: Tensor | slice  # of the queries, sequence by sequence
    columns: Tensor | slice
    query_ends: Tensor  # [pieces + 1] int32: the start of each sequence, and the end of the last
    key_ends: Tensor
    longest: tuple[int, int]
    causal: bool
    covered: int  # rows of the queries, each in one sequence
    repeats: bool  # a key is in several sequences


@dataclass(frozen=True, eq=False)
class _VarlenCalls:
    """All calls of a row, made once for all layers and both passes."""

    levels: Levels
    calls: Sequence[_VarlenLevel]
    no_dropout: tuple[Tensor, Tensor]  # arguments of the backward pass: a random state that is not read

    def rounds_once(self, final: bool) -> bool:
        """Return whether at most two numbers are added, so that the sum needs no wider dtype than its result."""
        return final and len(self.calls) <= 2 and not any(call.repeats for call in self.calls)


class VarlenFlashKernel:
    """A ``PieceKernel`` (strop.models.attention.merged_attention) on a GPU, for pieces that are causal squares or have no mask."""

    def __init__(self) -> None:
        self._made: dict[int, _VarlenCalls] = {}  # by the id of the levels, which all layers share

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, levels: Levels, spec: AttentionSpec, *, final: bool
    ) -> tuple[Tensor, Tensor]:
        made = self._calls(levels, query.device)
        output: Tensor | None = None
        for call in made.calls:
            rows = (_take(query, call.rows), _take(key, call.columns), _take(value, call.columns))
            part, part_lse, *_ = aten._flash_attention_forward(
                *rows, call.query_ends, call.key_ends, *call.longest, 0.0, call.causal, False, scale=spec.scale
            )
            if output is None:
                part = part if made.rounds_once(final) else at_least_float32(part)
                output, lse = _place(part, part_lse, call, len(query))
            else:
                merge_rows(output, lse, part, part_lse, call.rows)
        assert output is not None, "attention without keys"
        return output, lse.t()

    def backward(
        self, rows: Gradients, output: Tensor, lse: Tensor, grad: Tensor, levels: Levels, spec: AttentionSpec, *, final: bool
    ) -> Gradients:
        made, totals = self._calls(levels, grad.device), lse.t()
        grads: Sequence[Tensor] = ()
        for call in made.calls:
            places = (call.rows, call.columns, call.columns)
            parts = aten._flash_attention_backward(
                _take(grad, call.rows),
                *(_take(row, place) for row, place in zip(rows, places, strict=True)),
                _take(output, call.rows),
                _take(totals, call.rows, 1).contiguous(),
                call.query_ends,
                call.key_ends,
                *call.longest,
                0.0,
                call.causal,
                *made.no_dropout,
                scale=spec.scale,
            )
            if not grads and all(_is_whole(place, row) for place, row in zip(places, rows, strict=True)):
                grads = tuple(part if made.rounds_once(final) else at_least_float32(part) for part in parts)
                continue
            grads = grads or tuple(at_least_float32(torch.zeros_like(row)) for row in rows)
            for whole, part, place in zip(grads, parts, places, strict=True):
                _add_rows(whole, part, place)
        assert grads, "attention without keys"
        return grads[0], grads[1], grads[2]

    def _calls(self, levels: Levels, device: torch.device) -> _VarlenCalls:
        if id(levels) not in self._made:
            calls = [
                _make_varlen(list(pieces), causal)
                for level in levels
                for causal, pieces in groupby(level, lambda piece: piece.causal)
            ]
            no_dropout = (torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device))
            self._made[id(levels)] = _VarlenCalls(levels, move_fields(calls, device), no_dropout)
        return self._made[id(levels)]


def _take(tensor: Tensor, place: Tensor | slice, dimension: int = 0) -> Tensor:
    """Return some rows: all of them are no launch, and neither are consecutive ones."""
    if isinstance(place, Tensor):
        return tensor.index_select(dimension, place)
    return tensor[place] if dimension == 0 else tensor[:, place]


def _is_whole(place: Tensor | slice, tensor: Tensor) -> bool:
    return isinstance(place, slice) and place.stop - place.start == len(tensor)


def _place(part: Tensor, lse: Tensor, call: _VarlenLevel, rows: int) -> tuple[Tensor, Tensor]:
    """Return the first part of [rows, heads, V] and [heads, rows]: nothing is copied if it is in order, and all of it."""
    if _is_whole(call.rows, part) and call.covered == rows:
        return part, lse
    blank = call.covered < rows
    output = part.new_zeros(rows, *part.shape[1:]) if blank else part.new_empty(rows, *part.shape[1:])
    whole = lse.new_full((len(lse), rows), float("-inf")) if blank else lse.new_empty(len(lse), rows)
    output[call.rows], whole[:, call.rows] = part, lse
    return output, whole


def _add_rows(whole: Tensor, part: Tensor, place: Tensor | slice) -> None:
    if isinstance(place, slice):
        whole[place].add_(part)  # += would also copy the sum to where it is
    else:
        whole.index_add_(0, place, part.to(whole.dtype))


def _make_varlen(pieces: list[AttentionPiece], causal: bool) -> _VarlenLevel:
    assert causal or all(piece.distance is None for piece in pieces), "a window, which this kernel does not have"
    queries, keys = [piece.queries for piece in pieces], [piece.keys for piece in pieces]
    ends = [torch.tensor(list(accumulate(sizes, initial=0)), dtype=torch.int32) for sizes in (queries, keys)]
    rows = _gather([(piece.query, piece.queries) for piece in pieces])
    columns = _gather([(piece.key, piece.keys) for piece in pieces])
    repeats = not isinstance(columns, slice) and len(columns.unique()) < len(columns)
    return _VarlenLevel(rows, columns, ends[0], ends[1], (max(queries), max(keys)), causal, sum(queries), repeats)


def _gather(ranges: list[tuple[int, int]]) -> Tensor | slice:
    """Return the rows of consecutive ranges (first, count): a slice if the ranges are adjacent, otherwise indices."""
    if all(first + count == after for (first, count), (after, _) in pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][0] + ranges[-1][1])
    return torch.cat([torch.arange(first, first + count) for first, count in ranges])
