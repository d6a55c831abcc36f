"""The exchange between context ranks in attention: of heads if their number is divisible, otherwise of keys and values around a
ring.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from strop.learner.parallel.collectives import all_gather, all_to_all, local_rows
from strop.models.attention.attention_plan import AttentionPlan, AttentionSpec
from strop.models.attention.kernel_choice import choose_piece_kernel
from strop.models.attention.merged_attention import PieceKernel, merge_part, sink_gradient, weigh_sinks
from strop.models.attention.tree_pieces import Levels
from strop.models.attention.tree_plan import TreePlan
from strop.models.local_files import list_divisors
from strop.models.mixers.indexers import IndexRows, PathBlocks
from strop.models.mixers.recurrence import MixerSpec, Recurrence, Rows
from strop.sampling import at_least_float32

log = logging.getLogger(__name__)
dist: Any = torch.distributed
Group = Any  # torch.distributed.ProcessGroup


class ContextPlan:
    """An attention plan for ranks that each have an equal part of a row, padded at its end. ``length``: of the row without
    padding.
    """

    def __init__(self, plan: AttentionPlan, group: Group, length: int) -> None:
        self.heads_exchanged = UlyssesPlan(plan, group, length)
        self.plan = plan
        self.group = group
        self.length = length

    @cached_property
    def ring(self) -> RingPlan:
        assert isinstance(self.plan, TreePlan), f"{type(self.plan).__name__} has no pieces"
        return RingPlan(self.plan, self.group)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention of this rank's rows: [t, heads, D] x [t, kv_heads, D] -> [t, heads, V]."""
        ranks = self.heads_exchanged.world_size
        if query.shape[1] % ranks == 0:
            return self.heads_exchanged.attend(query, key, value, spec)
        if spec.pooled:
            raise ValueError(
                f"context_parallel_size {ranks} does not divide the {query.shape[1]} heads of layer {spec.layer}, whose tokens attend to "
                f"blocks of {spec.block} tokens; set it to one of {list_divisors(query.shape[1])}"
            )
        _log_once(query.shape[1], ranks)
        return self.ring.attend(query, key, value, spec)

    def choose(self, rows: IndexRows, layer: int) -> Tensor:
        """The choice of this rank's queries among the keys of all ranks. Keys of blocks are already those of all."""
        keys = all_gather(rows.key, self.group)[: self.length] if not rows.pooled else rows.key
        first = dist.get_rank(self.group) * len(rows.query)
        assert isinstance(self.plan, TreePlan), f"{type(self.plan).__name__} chooses for whole rows"
        return self.plan.choose(replace(rows, key=keys), layer, first)

    def blocks(self, size: int) -> PathBlocks:
        """The blocks of the whole row, which take rows of all ranks: each rank pools all of them."""
        assert isinstance(self.plan, TreePlan), f"{type(self.plan).__name__} has no blocks"
        return replace(self.plan.blocks(size), gather=lambda rows: all_gather(rows, self.group)[: self.length])

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, spec: MixerSpec) -> Tensor:
        """Convolution of this rank's rows, [t, C] -> [t, C]."""
        if inputs.shape[1] % self.heads_exchanged.world_size == 0:
            return self.heads_exchanged.convolve(inputs, weight, bias, spec)
        return self._of_all_rows(lambda rows: self.heads_exchanged.plan.convolve(rows[0], weight, bias, spec), [inputs])

    def scan(self, recurrence: Recurrence, rows: Rows, spec: MixerSpec) -> Tensor:
        """A recurrence of this rank's rows: of all tokens and some heads on each rank if its states are those of heads."""
        if not recurrence.constants and recurrence.state_shape[0] % self.heads_exchanged.world_size == 0:
            return self.heads_exchanged.scan(recurrence, rows, spec)
        return self._of_all_rows(lambda gathered: self.heads_exchanged.plan.scan(recurrence, gathered, spec), rows)

    def _of_all_rows(self, compute: Callable[[Rows], Tensor], rows: Rows) -> Tensor:
        """Compute outputs of all tokens on each rank, and return those of this rank's."""
        gathered = [all_gather(each, self.group)[: self.length] for each in rows]
        outputs = compute(gathered)
        missing = len(rows[0]) * self.heads_exchanged.world_size - self.length
        return local_rows(torch.cat([outputs, outputs.new_zeros(missing, *outputs.shape[1:])]), self.group)


_logged: set[tuple[int, int]] = set()


def _log_once(heads: int, ranks: int) -> None:
    if (heads, ranks) not in _logged:
        _logged.add((heads, ranks))
        log.info(
            "keys and values go around a ring of %d context ranks, which cannot have %d heads divided among them", ranks, heads
        )


class UlyssesPlan:
    """An attention plan that exchanges some tokens of all heads for all tokens of some heads, and calls ``plan`` with these
    (DeepSpeed-Ulysses, arXiv 2309.14509).

    Each rank attends to all tokens with some heads as a single device would, so prefixes, windows and softcaps need no special
    handling.
    """

    def __init__(self, plan: AttentionPlan, group: Group, length: int) -> None:
        self.plan: Any = plan  # a MixerPlan as well, for recurrent layers
        self.group = group
        self.world_size: int = dist.get_world_size(group)
        self.length = length  # tokens of the row without padding

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """[t, heads, D] -> [t, heads, D]; the number of heads must be a multiple of the number of ranks. Keys and values of blocks after
        those of the row are those of all ranks.
        """
        kv_heads, count, rank = key.shape[1], len(query), dist.get_rank(self.group)
        repeats = self.world_size // gcd(kv_heads, self.world_size)
        if repeats > 1:  # send a key to every rank with a query head that uses it
            key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        pooled = [tensor[count:].chunk(self.world_size, 1)[rank] for tensor in (key, value)]
        query, key, value = self._to_heads(query, key[:count], value[:count])
        padding = len(query) - self.length
        query, key, value = (tensor[: self.length] for tensor in (query, key, value))
        if spec.pooled:
            key, value = (torch.cat(parts) for parts in zip((key, value), pooled, strict=True))
        if spec.sinks is not None and self.world_size > 1:
            spec = replace(spec, sinks=spec.sinks.chunk(self.world_size)[rank])
        if spec.chosen is not None:
            chosen = all_gather(spec.chosen, self.group)[: self.length]
            if chosen.dim() == 3:
                chosen = chosen.repeat_interleave(repeats, 1).chunk(self.world_size, 1)[rank]
            spec = replace(spec, chosen=chosen)
        attended = self.plan.attend(query, key, value, spec)
        return self._to_tokens(pad(attended, (0, 0, 0, 0, 0, padding)) if padding else attended)

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, spec: MixerSpec) -> Tensor:
        """[t, C] -> [t, C], with the channels of this rank for all tokens in between."""
        rank = dist.get_rank(self.group)
        weight, bias = weight.chunk(self.world_size)[rank], None if bias is None else bias.chunk(self.world_size)[rank]
        rows = self._to_heads(inputs.unsqueeze(-1))[0]
        outputs = self.plan.convolve(rows[: self.length].squeeze(-1), weight, bias, spec).unsqueeze(-1)
        return self._to_tokens(pad(outputs, (0, 0, 0, 0, 0, len(rows) - self.length))).squeeze(-1)

    def scan(self, recurrence: Recurrence, rows: Rows, spec: MixerSpec) -> Tensor:
        """Rows [t, heads, ...] -> [t, heads, V], with the states of this rank's heads for all tokens in between."""
        heads = recurrence.state_shape[0]
        if any(row.shape[1] % self.world_size for row in rows):  # groups of heads with the same keys
            rows = [row.repeat_interleave(heads // row.shape[1], dim=1) for row in rows]
        wide = self._to_heads(*(row if row.dim() == 3 else row.unsqueeze(-1) for row in rows))
        local = [all_[: self.length].flatten(2 if row.dim() == 3 else 1) for all_, row in zip(wide, rows, strict=True)]
        recurrence = replace(recurrence, state_shape=(heads // self.world_size, *recurrence.state_shape[1:]))
        outputs = self.plan.scan(recurrence, local, spec)
        return self._to_tokens(pad(outputs, (0, 0, 0, 0, 0, len(wide[0]) - self.length)))

    def _to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """[t, heads, D] each -> [ranks * t, heads / ranks, D] each, in one exchange."""
        if self.world_size == 1:
            return list(tensors)
        blocks = [tensor.unflatten(1, (self.world_size, -1)) for tensor in tensors]  # [t, ranks, heads / ranks, D]
        rows = torch.cat([block.flatten(2) for block in blocks], dim=2).transpose(0, 1).flatten(0, 1)
        received = all_to_all(rows, self.group).split([block.shape[2] * block.shape[3] for block in blocks], dim=1)
        return [rows.unflatten(1, block.shape[2:]) for rows, block in zip(received, blocks, strict=True)]

    def _to_tokens(self, attended: Tensor) -> Tensor:
        """[ranks * t, heads / ranks, D] -> [t, heads, D]."""
        if self.world_size == 1:
            return attended
        received: Tensor = all_to_all(attended, self.group).unflatten(0, (self.world_size, -1))  # type: ignore[no-untyped-call]
        return received.transpose(0, 1).flatten(1, 2)


class RingPlan:
    """An attention plan for ranks that each have an equal part of a tree's row, padded at its end: keys and values go around a ring
    (RingAttention, arXiv 2310.01889), over a prefix tree.

    Each rank keeps the queries of its rows and sees the keys and values of every rank in turn. It computes the pieces of the tree
    between its queries and these keys, and merges them by their log-sum-exp. In the backward pass the gradients of keys and values
    travel with them and return complete. It works for any number of heads.
    """

    def __init__(self, tree: TreePlan, group: Group) -> None:
        self.tree = tree
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)
        self._pieces: dict[tuple[int, int, int | None], Levels] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention of this rank's rows: [t, heads, D] x [t, kv_heads, D] -> [t, heads, V]."""
        spec = spec.drop_unused_window(self.tree.longest)
        name = choose_piece_kernel(self.tree.kernel, query, key, value, spec)
        kernel = self.tree.piece_kernel(name, query.device)
        apply: Any = _RingAttention.apply
        output: Tensor = apply(query, key, value, spec.sinks, self, kernel, spec)
        return output

    def pieces(self, source: int, rows: int, window: int | None) -> Levels:
        """Return the pieces of this rank's queries with the keys of rank ``source``; each rank has ``rows`` rows."""
        if (source, rows, window) not in self._pieces:
            own, theirs = ((rank * rows, (rank + 1) * rows) for rank in (self.rank, source))
            clipped = [
                tuple(part for piece in level if (part := piece.clip(own, theirs, window)) is not None)
                for level in self.tree.levels(window)
            ]
            self._pieces[source, rows, window] = tuple(level for level in clipped if level)
        return self._pieces[source, rows, window]

    def source(self, step: int) -> int:
        """Return the rank whose keys and values this rank holds after ``step`` steps."""
        return (self.rank - step) % self.world_size

    def of_keys(self, spec: AttentionSpec, source: int, rows: int) -> AttentionSpec:
        """Return the options for the keys of rank ``source``."""
        if spec.chosen is None:
            return spec
        return replace(spec, key_positions=self.tree.positions[source * rows : (source + 1) * rows] // spec.block)

    def start_passing(self, held: Tensor) -> _Passing:
        """Start sending the held tensor to the next rank, and receiving one from the previous rank."""
        received = torch.empty_like(held)
        after, before = (dist.get_global_rank(self.group, (self.rank + step) % self.world_size) for step in (1, -1))
        operations = [
            dist.P2POp(dist.isend, held, after, group=self.group),
            dist.P2POp(dist.irecv, received, before, group=self.group),
        ]
        return _Passing(held, received, dist.batch_isend_irecv(operations))


class _Passing:
    """A tensor on its way around the ring."""

    def __init__(self, held: Tensor, received: Tensor, requests: list[Any]) -> None:
        self._held = held  # must stay alive until it is sent
        self._received = received
        self._requests = requests

    def wait(self) -> Tensor:
        for request in self._requests:
            request.wait()
        return self._received


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        ring: RingPlan,
        kernel: PieceKernel,
        spec: AttentionSpec,
    ) -> Tensor:
        output = at_least_float32(query.new_zeros(*query.shape[:2], value.shape[2]))
        lse = at_least_float32(query.new_full(query.shape[:2], float("-inf")))
        held = torch.cat([key, value], dim=-1)  # [t, kv_heads, D + V]
        for step in range(ring.world_size):
            passing = ring.start_passing(held) if step + 1 < ring.world_size else None
            if levels := ring.pieces(ring.source(step), len(query), spec.window):
                keys, values = held.split([key.shape[2], value.shape[2]], dim=-1)
                part = ring.of_keys(spec, ring.source(step), len(query))
                merge_part(output, lse, *kernel.forward(query, keys, values, levels, part, final=False))
            held = held if passing is None else passing.wait()
        if sinks is not None:
            output, lse = weigh_sinks(output, lse, sinks)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse, sinks)
        ctx.ring, ctx.kernel, ctx.spec = ring, kernel, spec
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, sinks = ctx.saved_tensors
        ring, grad = ctx.ring, grad.contiguous()
        sizes = [key.shape[2], value.shape[2]]
        query_grad = at_least_float32(torch.zeros_like(query))
        held = torch.cat([key, value], dim=-1)
        held_grad = at_least_float32(torch.zeros_like(held))
        for step in range(ring.world_size):
            passing = ring.start_passing(held) if step + 1 < ring.world_size else None
            if levels := ring.pieces(ring.source(step), len(query), ctx.spec.window):
                rows = (query, *held.split(sizes, dim=-1))
                part = ring.of_keys(ctx.spec, ring.source(step), len(query))
                own, *others = ctx.kernel.backward(rows, output, lse, grad, levels, part, final=False)
                query_grad += own
                held_grad += torch.cat(others, dim=-1)
            held = held if passing is None else passing.wait()
            held_grad = ring.start_passing(held_grad).wait() if ring.world_size > 1 else held_grad
        key_grad, value_grad = held_grad.to(key.dtype).split(sizes, dim=-1)
        sinks_grad = None if sinks is None else sink_gradient(output, lse, grad, sinks)
        return query_grad.to(query.dtype), key_grad, value_grad, sinks_grad, None, None, None
