"""Mixers on tensor ranks: each rank computes some of the heads.

Layers of one section are sharded as those of attention. Of a fused projection, a rank stores equal adjacent rows like any other rank, so
that optimizers, checkpoints and published weights see an ordinary shard, and exchanges rows with the others in each forward pass for
those of its heads. Convolutions, decays, biases and norms are small: they are whole on each rank, which reads its part of them, and
their gradients are partial sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.learner.parallel.collectives import all_reduce, all_to_all, copy_to_ranks
from strop.learner.parallel.head_layout import (
    SCALED_NORM_OF_GROUPS,
    HeadLayout,
    Sections,
    count_rows,
    find_base,
    find_gated_norm,
    find_tensors,
    is_exchanged,
    rows_of_rank,
)
from strop.learner.parallel.parallel_dims import to_local
from strop.models.layers.rounded_layers import RoundedLinear
from strop.sampling import at_least_float32

dist: Any = torch.distributed
Group = Any  # torch.distributed.ProcessGroup


class RowExchange:
    """Gives each rank the rows of its heads, of a weight that the ranks hold in equal shards of adjacent rows."""

    def __init__(self, sections: Sections, group: Group) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        size = count_rows(sections) // ranks
        shards = [range(each * size, (each + 1) * size) for each in range(ranks)]
        needed = [rows_of_rank(sections, each, ranks) for each in range(ranks)]
        sent = [_overlaps(parts, shards[rank]) for parts in needed]
        self.group = group
        self.parts = [(part.start - shards[rank].start, len(part)) for parts in sent for part in parts]
        self.sent = [sum(map(len, parts)) for parts in sent]
        self.received = [sum(map(len, _overlaps(needed[rank], shard))) for shard in shards]

    def __call__(self, shard: Tensor) -> Tensor:
        """[rows / ranks, ...] -> [rows of this rank's heads, ...], in the weight's order; gradients return to where the rows are."""
        kind = shard.device.type
        if torch.is_autocast_enabled(kind):  # as the product would read it
            shard = shard.to(torch.get_autocast_dtype(kind))
        rows = torch.cat([shard.narrow(0, *part) for part in self.parts])
        return all_to_all(rows, self.group, self.received, self.sent)


def _overlaps(parts: list[range], shard: range) -> list[range]:
    found = (range(max(part.start, shard.start), min(part.stop, shard.stop)) for part in parts)
    return [each for each in found if len(each)]


class _ExchangedLinear(nn.Linear):
    """A linear layer that computes the rows of this rank's heads. Its weight is a shard of other rows, its bias is whole."""

    exchange: RowExchange

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.exchange(to_local(self.weight)), self.bias)


class _ExchangedRounding(nn.Module):
    """Mixin for the class of a ``RoundedLinear``: a shard is rounded by the rank that has it."""

    exchange: RowExchange

    def rounded_weight(self, dtype: torch.dtype) -> Tensor:
        parent: Any = super()
        return self.exchange(parent.rounded_weight(dtype))


def exchange_rows(layer: Any, exchange: RowExchange) -> None:
    """Let a linear layer compute the rows of this rank's heads, in place."""
    kind = type(layer)
    rounded = isinstance(layer, RoundedLinear)
    layer.__class__ = type(f"Exchanged{kind.__name__}", (_ExchangedRounding, kind), {}) if rounded else _ExchangedLinear
    layer.exchange = exchange


def shard_mixer(mixer: nn.Module, layout: HeadLayout, group: Group) -> None:
    """Let a mixer compute this rank's heads, in place, with linear layers that are sharded separately."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    _LocalWeights(mixer, layout, rank, ranks)
    for name, sections in layout.counts.items():
        parent, _, attribute = name.rpartition(".")
        setattr(mixer.get_submodule(parent), attribute, sum(map(len, rows_of_rank(sections, rank, ranks))))
    if layout.norm_groups % ranks:
        mixer.norm.forward = _SharedNorm(mixer.norm, layout.norm_groups, group)  # type: ignore[union-attr, assignment]
    elif layout.norm_groups and hasattr(mixer.norm, "n_groups"):
        mixer.norm.n_groups = layout.norm_groups // ranks  # type: ignore[union-attr, assignment]


class _LocalWeights:
    """Puts this rank's part of the weights that a mixer reads itself in their places while it runs."""

    def __init__(self, mixer: nn.Module, layout: HeadLayout, rank: int, ranks: int) -> None:
        found = [(*place, sections) for name, sections in layout.weights.items() for place in find_tensors(mixer, name)]
        for name, sections in layout.projections.items():
            base = find_base(mixer, name)
            if base.bias is not None and is_exchanged(sections, ranks):
                found.append((base._parameters, "bias", sections))
        self.places = [
            (holder, key, rows_of_rank(sections, rank, ranks), count_rows(sections)) for holder, key, sections in found
        ]
        self.whole: list[Tensor] = []
        mixer.register_forward_pre_hook(self._enter)
        mixer.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *unused: Any) -> None:
        self.whole = [holder[key] for holder, key, _, _ in self.places]
        for (holder, key, rows, size), tensor in zip(self.places, self.whole, strict=True):
            dimension = tensor.shape.index(size)
            holder[key] = torch.cat([tensor.narrow(dimension, each.start, len(each)) for each in rows], dimension)

    def _leave(self, *unused: Any) -> None:
        for (holder, key, _, _), tensor in zip(self.places, self.whole, strict=False):  # none if another hook failed before
            holder[key] = tensor
        self.whole = []


class _SharedNorm:
    """The forward pass of a gated RMS norm over channels that several ranks have a part of each."""

    def __init__(self, norm: Any, groups: int, group: Group) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        form = find_gated_norm(norm)
        self.norm, self.group = norm, group
        self.groups, self.place = groups, rank * groups // ranks  # this rank's channels are all of one group
        self.width = len(norm.weight) // groups  # channels of a group
        self.gate_last = form == SCALED_NORM_OF_GROUPS and norm.norm_before_gate
        self.rounds_first = form != SCALED_NORM_OF_GROUPS

    def __call__(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """[..., channels of this rank] -> the same shape"""
        hidden = at_least_float32(hidden_states)
        gates = None if gate is None else F.silu(at_least_float32(gate))
        if gates is not None and not self.gate_last:
            hidden = hidden * gates
        squares = hidden.square().sum(-1, keepdim=True)
        squares = F.pad(squares, (self.place, self.groups - 1 - self.place))
        squares = copy_to_ranks(all_reduce(squares, self.group), self.group)[..., self.place : self.place + 1]
        hidden = hidden * torch.rsqrt(squares / self.width + self.norm.variance_epsilon)
        weight: Tensor = self.norm.weight
        hidden = weight * (hidden.to(hidden_states.dtype) if self.rounds_first else hidden)
        if gates is not None and self.gate_last:
            hidden = hidden * gates
        return hidden if self.rounds_first else hidden.to(hidden_states.dtype)
