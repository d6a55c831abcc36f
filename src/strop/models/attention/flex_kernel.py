"""Attention by torch's FlexAttention (arXiv 2412.05496), with a block mask made from the tree.

In depth-first order, the descendants of a segment form one contiguous range: the token at place q attends to the one at place k
if k <= q < end(k), the first place outside the subtree of k's segment. The block mask follows from the smallest and largest
place of each block, without a mask of tokens x tokens. On a CPU the kernel returns neither log-sum-exp nor gradient; both are
computed blockwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from strop.device_copies import move
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.attention.blockwise_kernel import BlockwiseKernel
from strop.models.attention.merged_attention import Gradients, weigh_sinks
from strop.models.attention.tree_pieces import Levels, TreeSegments
from strop.sampling import at_least_float32

BLOCK = 128


class FlexKernel:
    """Attention over one tree: a ``PieceKernel`` (strop.models.attention.merged_attention), and on a GPU a kernel with its own gradient."""

    def __init__(self, segments: TreeSegments, device: torch.device) -> None:
        self.place, self.end, self.position = move(tree_columns(segments), device)
        self.blockwise = BlockwiseKernel()
        self._masks: dict[int | None, BlockMask] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention [T, heads, D] x [T, kv_heads, D] -> [T, heads, V], with the kernel's own gradient, which is not available on
        a CPU.
        """
        output, lse = self._call(query, key, value, spec, needs_lse=spec.sinks is not None)
        if spec.sinks is not None:
            assert lse is not None
            output, _ = weigh_sinks(at_least_float32(output), lse, spec.sinks)
        return output.to(query.dtype)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, levels: Levels, spec: AttentionSpec, *, final: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The forward pass on a CPU."""
        query, key, value = query.detach(), key.detach(), value.detach()
        output, _ = self._call(query, key, value, spec, needs_lse=False)
        return at_least_float32(output), self.blockwise.forward(query, key, value[..., :0], levels, spec)[1]

    def backward(
        self,
        rows: Gradients,
        output: Tensor,
        lse: Tensor,
        grad: Tensor,
        levels: Levels,
        spec: AttentionSpec,
        *,
        final: bool = False,
    ) -> Gradients:
        return self.blockwise.backward(rows, output, lse, grad, levels, spec)

    def _call(
        self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, *, needs_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows = (row.transpose(0, 1)[None] for row in (query, key, value))  # [1, heads, T, D]
        result = compiled_flex()(
            *rows,
            score_mod=None
            if spec.softcap is None
            else _softcap(torch.full((query.shape[1],), spec.softcap, device=query.device)),
            block_mask=self._block_mask(spec.window),
            scale=spec.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=True) if needs_lse else None,
        )
        output, lse = (result[0], result[1].lse[0].transpose(0, 1)) if needs_lse else (result, None)
        return output[0].transpose(0, 1), lse

    def _block_mask(self, window: int | None) -> BlockMask:
        if window not in self._masks:
            self._masks[window] = make_block_mask(self.place, self.end, self.position, window)
        return self._masks[window]


@cache
def compiled_flex() -> Any:
    """FlexAttention compiled for any length; uncompiled it materializes all scores at once."""
    return torch.compile(flex_attention, dynamic=True)


def tree_columns(segments: TreeSegments) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's place in the depth-first order, the end of its segment's subtree, and its position, [T] int32 each."""
    total = sum(segments.lengths)
    place, end, position = (torch.zeros(total, dtype=torch.int32) for _ in range(3))
    counted, open_segments = 0, list[tuple[int, int]]()  # (segment, depth) of the current path

    def close(depth: int) -> None:
        while open_segments and open_segments[-1][1] >= depth:
            segment, _ = open_segments.pop()
            end[_tokens(segments, segment)] = counted

    for segment, depth, first in segments.walk():
        close(depth)
        tokens, length = _tokens(segments, segment), segments.lengths[segment]
        place[tokens] = torch.arange(counted, counted + length, dtype=torch.int32)
        position[tokens] = torch.arange(first, first + length, dtype=torch.int32)
        counted += length
        open_segments.append((segment, depth))
    close(0)
    return place, end, position


def _tokens(segments: TreeSegments, segment: int) -> slice:
    return slice(segments.starts[segment], segments.starts[segment] + segments.lengths[segment])


def make_block_mask(place: Tensor, end: Tensor, position: Tensor, window: int | None) -> BlockMask:
    """Return the mask of blocks of 128 tokens: those that a query sees in part, and those that it sees completely.

    If a block's bounds are inconclusive, it counts as seen in part: that costs time at segment borders, not correctness.
    """
    low, high = _bounds(place)
    first_end, last_end = _bounds(end)
    near, far = _bounds(position)
    some = (low[None] <= high[:, None]) & (low[:, None] < last_end[None])  # [blocks of queries, blocks of keys]
    whole = (high[None] <= low[:, None]) & (high[:, None] < first_end[None])
    if window is not None:
        some &= near[:, None] - far[None] < window
        whole &= far[:, None] - near[None] < window
    if len(place) % BLOCK:
        whole[:, -1] = False  # the last block includes keys that do not exist
    partial = some & ~whole
    return BlockMask.from_kv_blocks(
        *_list_blocks(partial),
        *_list_blocks(whole),
        BLOCK,
        _mask(place, end, position, window),
        (len(place), len(place)),
    )


def _bounds(column: Tensor) -> tuple[Tensor, Tensor]:
    """[T] -> smallest and largest value of each block of 128."""
    missing = -len(column) % BLOCK
    blocks = torch.cat([column, column[-1:].expand(missing)]).view(-1, BLOCK)
    return blocks.amin(1), blocks.amax(1)


def _list_blocks(table: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] bool -> the number of true columns in each row, and all columns with the true ones first: [1, 1, ...]
    int32.
    """
    columns = table.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return table.sum(1, dtype=torch.int32)[None, None], columns.to(torch.int32)[None, None]


def _mask(place: Tensor, end: Tensor, position: Tensor, window: int | None) -> Callable[..., Tensor]:
    def under(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (place[key] <= place[query]) & (place[query] < end[key])

    if window is None:
        return under
    unseen = position - window  # a tensor: with a number, each window would be compiled again

    def under_in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return under(batch, head, query, key) & (position[key] > unseen[query])

    return under_in_window


def _softcap(caps: Tensor) -> Callable[..., Tensor]:  # [heads]: with numbers, each would be compiled again
    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return caps[head] * torch.tanh(score / caps[head])

    return capped
