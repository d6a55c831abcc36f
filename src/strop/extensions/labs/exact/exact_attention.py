"""Attention in which a query adds up its keys in one order, whatever is in the same batch.

Keys are taken in blocks of 128 from position 0 on, joined by position: that of a key in the cache or in the tree does not matter. Scores
and weighted values of a block are products of trusted shapes in float32; sums over blocks are made one block after another. A block
that a query does not see adds zero, so how many blocks there are does not matter either. In bfloat16 the inputs and the result are
rounded, and nothing between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from strop.extensions.labs.exact.row_products import (
    SHAPES,
    ProductKind,
    RowFunction,
    apply_whole_vectors,
    in_reference_blocks,
    round_up_rows,
)
from strop.models.attention.attention_plan import AttentionSpec

KEY_BLOCK = 128  # keys
MOST_SCORES = 1 << 22  # numbers in memory at once


def exact_attention(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, spec: AttentionSpec) -> Tensor:
    """query [B, heads, L, D] at ``positions`` [B or 1, L] x key, value [B, kv_heads, S, D] at positions 0 .. S - 1 -> [B, heads, L, D].

    S is a multiple of 128, beginning from 0; keys beyond a query's position may hold anything finite. Differentiable.
    """
    with torch._C.DisableTorchFunction(), torch.autocast(query.device.type, enabled=False):
        apply: Any = _ExactAttention.apply
        output: Tensor = apply(query, key, value, spec.sinks, positions, spec)
        return output


def attend_cached(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention over keys in the order of their positions: [B, heads, L, D] x [B, kv_heads, S, D] -> [B, heads, L, D] in query's dtype.

    ``positions`` [B or 1, L] are those of the queries. Keys are padded to whole blocks.
    """
    missing = -key.shape[2] % KEY_BLOCK
    if missing:
        key, value = (F.pad(tensor, (0, 0, 0, missing)) for tensor in (key, value))
    return exact_attention(query, key, value, positions, spec)


class _ExactAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, positions: Tensor, spec: AttentionSpec
    ) -> Tensor:
        ctx.spec = spec
        keys, values = key.float(), value.float()
        parts = [_attend_rows(rows, keys, values, spec) for rows in _split_queries(query, positions, keys.shape)]
        output = torch.cat([part.output for part in parts], dim=2) if len(parts) > 1 else parts[0].output
        output = output.to(query.dtype)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(
                query, key, value, sinks, positions, *(tensor for part in parts for tensor in (part.peak, part.total))
            )
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, sinks, positions, *stats = ctx.saved_tensors
        keys, values, grads = key.float(), value.float(), grad.float()
        grad_keys, grad_values, grad_queries, start = torch.zeros_like(keys), torch.zeros_like(values), [], 0
        grad_sinks: list[Tensor] = []  # [heads] of each part
        for index, rows in enumerate(_split_queries(query, positions, keys.shape)):
            part = _AttendedRows(grads[:, :, start : start + rows.count], stats[2 * index], stats[2 * index + 1])
            grad_query, delta = _attend_backward(rows, part, (keys, values), (grad_keys, grad_values), ctx.spec)
            grad_queries.append(grad_query)
            if sinks is not None:
                share = (_spread_sinks(sinks, rows, keys.shape[1]) - part.peak).exp() / part.total
                grad_sinks.append(-(share * delta).view(len(query), -1, rows.count).sum((0, 2)))
            start += rows.count
        grad_inputs = (torch.cat(grad_queries, dim=2).to(query.dtype), grad_keys.to(key.dtype), grad_values.to(value.dtype))
        return *grad_inputs, torch.stack(grad_sinks).sum(0).to(sinks.dtype) if grad_sinks else None, None, None


@dataclass(frozen=True, eq=False)
class _QueryRows:
    """Queries of neighbouring positions."""

    query: Tensor  # [B, heads, count, D]
    positions: Tensor  # [B or 1, count]

    @property
    def count(self) -> int:
        return self.query.shape[2]


@dataclass(frozen=True, eq=False)
class _AttendedRows:
    output: Tensor  # [B, heads, count, D]; going back, its gradient
    peak: Tensor  # [B * kv_heads, rows], the largest score
    total: Tensor  # [B * kv_heads, rows], the sum of exp(score - peak)


def _split_queries(query: Tensor, positions: Tensor, key_shape: torch.Size) -> Iterator[_QueryRows]:
    """Yield the queries in parts whose scores fit into memory."""
    batch, heads, length, _ = query.shape
    most = max(1, MOST_SCORES // (batch * heads * key_shape[2]))
    most = most if most < 8 else most // 8 * 8
    for start in range(0, length, most):
        yield _QueryRows(query[:, :, start : start + most], positions[:, start : start + most])


def _stack_heads(query: Tensor, kv_heads: int) -> Tensor:
    """[B, heads, L, D] -> [B * kv_heads, heads / kv_heads * L, D]: query heads that share a key-value head are adjacent."""
    return query.reshape(query.shape[0] * kv_heads, -1, query.shape[3])


def _visible_span(rows: _QueryRows, keys: int, window: int | None) -> tuple[int, int]:
    """Return the blocks (first, last + 1) that any of the rows sees: the others would add zero."""
    last = min(int(rows.positions.max()) // KEY_BLOCK + 1, keys // KEY_BLOCK)
    first = 0 if window is None else max(0, int(rows.positions.min()) - window + 1) // KEY_BLOCK
    return first, last


def _attend_rows(rows: _QueryRows, keys: Tensor, values: Tensor, spec: AttentionSpec) -> _AttendedRows:
    batch, heads, count, _ = rows.query.shape
    stacked = _stack_heads(rows.query.float() * spec.scale, keys.shape[1])
    real = stacked.shape[1]
    stacked = F.pad(stacked, (0, 0, 0, round_up_rows(real) - real))
    first, last = _visible_span(rows, keys.shape[2], spec.window)
    blocks = range(first, last)
    scores = torch.stack([_multiply_blocks("scores", stacked, _take_block(keys, block).transpose(1, 2)) for block in blocks])
    if spec.softcap is not None:
        scores = apply_whole_vectors(torch.tanh, scores.div_(spec.softcap)).mul_(spec.softcap)
    _mask(scores, rows, keys.shape[1], first, spec.window)
    peak = scores.amax(dim=(0, -1))  # [B * kv_heads, rows]
    sinks = None if spec.sinks is None else F.pad(_spread_sinks(spec.sinks, rows, keys.shape[1]), (0, stacked.shape[1] - real))
    if sinks is not None:
        peak = torch.maximum(peak, sinks)
    weights = apply_whole_vectors(torch.exp, scores.sub_(peak[None, :, :, None]))
    sums = weights.sum(-1)
    output, total = _multiply_blocks("values", weights[0], _take_block(values, first)), sums[0].clone()
    for index, block in enumerate(blocks):
        if index:
            output += _multiply_blocks("values", weights[index], _take_block(values, block))
            total += sums[index]
    if sinks is not None:
        total += apply_whole_vectors(torch.exp, sinks - peak)
    output = (output / total[..., None])[:, :real].reshape(batch, heads, count, -1)
    return _AttendedRows(output, peak[:, :real], total[:, :real])


def _spread_sinks(sinks: Tensor, rows: _QueryRows, kv_heads: int) -> Tensor:
    """[heads] -> [B * kv_heads, heads / kv_heads * count], as ``_stack_heads`` orders the rows."""
    batch, heads, count, _ = rows.query.shape
    return sinks.float()[None, :, None].expand(batch, heads, count).reshape(batch * kv_heads, -1)


def _mask(scores: Tensor, rows: _QueryRows, kv_heads: int, first: int, window: int | None) -> None:
    """Set the scores [blocks, B * kv_heads, rows, 128] of keys that a query does not see to -inf, in place."""
    length = len(scores) * KEY_BLOCK
    places = torch.arange(first * KEY_BLOCK, first * KEY_BLOCK + length, device=scores.device)
    distance = rows.positions[:, :, None] - places  # [B or 1, count, length]
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    hidden = hidden.view(*hidden.shape[:2], len(scores), KEY_BLOCK).permute(2, 0, 1, 3)[:, :, None, None]
    batch, heads, count, _ = rows.query.shape
    groups = heads // kv_heads
    real = scores[:, :, : groups * count].view(len(scores), batch, kv_heads, groups, count, KEY_BLOCK)
    real.masked_fill_(hidden, float("-inf"))


def _take_block(tensor: Tensor, block: int) -> Tensor:
    """[B, kv_heads, S, D] -> [B * kv_heads, 128, D]"""
    return tensor[:, :, block * KEY_BLOCK : (block + 1) * KEY_BLOCK].flatten(0, 1)


def _multiply_blocks(name: str, rows: Tensor, block: Tensor) -> Tensor:
    """Return rows [b, r, K] times [b, K, N] -> [b, r, N], each row in the reference's order of additions."""
    kind = ProductKind(name, rows.shape[2], block.shape[2], rows.dtype, rows.device)
    if SHAPES.trusts(kind, tuple(rows.shape[:2]), lambda: _trial_blocks(kind)):
        return torch.bmm(rows, block)
    return torch.stack(
        [
            in_reference_blocks(lambda part, matrix=matrix: torch.bmm(part, matrix[None]), part, dims=2)  # type: ignore[misc]
            for part, matrix in zip(rows, block, strict=True)
        ]
    )


def _trial_blocks(kind: ProductKind) -> RowFunction:
    generator = torch.Generator().manual_seed(kind.outputs)
    if kind.name == "scores":  # as a transposed view, like the cache's
        block = torch.randn(kind.outputs, kind.inputs, generator=generator).to(kind.device).t()
    else:
        block = torch.randn(kind.inputs, kind.outputs, generator=generator).to(kind.device)

    def product(rows: Tensor) -> Tensor:
        if kind.name == "scores":
            return torch.bmm(rows, block.t().expand(len(rows), -1, -1).contiguous().transpose(1, 2))
        return torch.bmm(rows, block.expand(len(rows), -1, -1).contiguous())

    return product


def _attend_backward(
    rows: _QueryRows, part: _AttendedRows, inputs: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor], spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the queries and the sums of weights times their gradients [B * kv_heads, rows].

    Those of keys and values are added to ``grads``. The formulas are FlashAttention's.
    """
    (keys, values), (grad_keys, grad_values) = inputs, grads
    kv_heads = keys.shape[1]
    query, grad = _stack_heads(rows.query.float() * spec.scale, kv_heads), _stack_heads(part.output, kv_heads)
    first, last = _visible_span(rows, keys.shape[2], spec.window)
    span = slice(first * KEY_BLOCK, last * KEY_BLOCK)
    key, value = keys[:, :, span].flatten(0, 1), values[:, :, span].flatten(0, 1)
    scores = query @ key.transpose(1, 2)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
        slope = 1 - (scores / spec.softcap).square()
    blocked = scores.unflatten(2, (-1, KEY_BLOCK)).permute(2, 0, 1, 3)
    _mask(blocked, rows, kv_heads, first, spec.window)
    weights = (scores - part.peak[..., None]).exp_() / part.total[..., None]
    grad_weights = grad @ value.transpose(1, 2)
    delta = (weights * grad_weights).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - delta)
    if spec.softcap is not None:
        grad_scores *= slope
    grad_values[:, :, span] += (weights.transpose(1, 2) @ grad).view(values[:, :, span].shape)
    grad_keys[:, :, span] += (grad_scores.transpose(1, 2) @ query).view(keys[:, :, span].shape)
    return (grad_scores @ key).mul_(spec.scale).view(rows.query.shape), delta.squeeze(-1)


# Attention of the learner's packed rows in ``exact_attention``'s order: each segment reads the keys of its path, by position.


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
