"""Mixers on tensor ranks: each rank computes some of the heads, and reads what they have of the weights.

It follows from the kind of a mixer (the functions that it calls), its layers' names and its own sizes, for any family whose modeling
file names them as Transformers does. A fused projection has several sections: [q | k | v], or [z | x | B | C | dt].

Layers of one section are sharded as those of attention. Of a fused projection, a rank stores equal adjacent rows like any other rank, so
that optimizers, checkpoints and published weights see an ordinary shard, and exchanges rows with the others in each forward pass for
those of its heads. Convolutions, decays, biases and norms are small: they are whole on each rank, which reads its part of them, and
their gradients are partial sums.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.learner.parallel.collectives import all_reduce, all_to_all, copy_to_ranks
from strop.learner.parallel.parallel_dims import to_local
from strop.models.layers.known_code import find_form
from strop.models.layers.rounded_layers import RoundedLinear
from strop.sampling import at_least_float32


@dataclass(frozen=True)
class Section:
    """Adjacent rows of a weight in equal blocks, one for each head, group of heads or channel."""

    rows: int
    count: int
    what: str
    shared: bool = False  # by heads of several ranks, if there are more ranks than blocks

    def fits(self, ranks: int) -> bool:
        return self.count % ranks == 0 or (self.shared and ranks % self.count == 0)

    def part(self, rank: int, ranks: int) -> range:
        """Return the rows that a rank reads."""
        if self.count % ranks == 0:
            return range(rank * self.rows // ranks, (rank + 1) * self.rows // ranks)
        size, block = self.rows // self.count, rank * self.count // ranks
        return range(block * size, (block + 1) * size)


Sections = tuple[Section, ...]


def count_rows(sections: Sections) -> int:
    return sum(section.rows for section in sections)


def is_exchanged(sections: Sections, ranks: int) -> bool:
    """Return whether the rows that a rank reads are others than those of an equal shard of adjacent rows."""
    return len(sections) > 1 or any(section.count % ranks for section in sections)


def rows_of_rank(sections: Sections, rank: int, ranks: int) -> list[range]:
    """Return the rows of a weight that a rank reads, in order."""
    parts, start = [], 0
    for section in sections:
        part = section.part(rank, ranks)
        parts.append(range(start + part.start, start + part.stop))
        start += section.rows
    return parts


@dataclass(frozen=True)
class HeadLayout:
    """The parts of a mixer that belong to heads, by name."""

    projections: Mapping[str, Sections]  # linear layers whose outputs are those of heads
    inputs: tuple[str, ...]  # linear layers that read the outputs of heads; the last one returns the mixer's
    weights: Mapping[str, Sections]  # parameters and buffers, or modules that hold them, which the mixer reads itself
    counts: Mapping[str, Sections]  # attributes with the number of heads, or of rows
    norm_groups: int = 0  # of the norm of all heads' outputs: channels of a group have one mean; 0: no such norm

    def sections(self) -> Iterator[Section]:
        for each in (*self.projections.values(), *self.weights.values()):
            yield from each

    def sizes(self) -> list[int]:
        """Return the numbers of ranks that can compute equally many heads each."""
        found = set(self.sections())
        return [size for size in range(1, max(each.count for each in found) + 1) if all(each.fits(size) for each in found)]


def find_head_layout(mixer: nn.Module) -> HeadLayout | None:
    """Return where the heads of a mixer are; None if its weights are not those of a known kind."""
    called = inspect.unwrap(type(mixer).forward).__code__.co_names
    describe = next((each for function, each in _KINDS.items() if function in called), None)
    try:
        layout = None if describe is None else describe(mixer)
    except AttributeError:  # sizes have other names
        return None
    return layout if layout is not None and _accounts_for(layout, mixer) else None


def find_tensors(mixer: nn.Module, name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the holders and keys of the tensors that a name of ``HeadLayout.weights`` stands for."""
    parent, _, last = name.rpartition(".")
    owner: Any = mixer.get_submodule(parent)
    module = getattr(owner, last)
    if isinstance(module, nn.Module):
        base: Any = getattr(module, "base_layer", module)
        yield from ((base._parameters, key) for key, tensor in base._parameters.items() if tensor is not None)
    else:
        yield (owner._parameters if last in owner._parameters else owner._buffers), last


def _accounts_for(layout: HeadLayout, mixer: nn.Module) -> bool:
    """Whether all of a mixer's weights have the sizes of a layout, or are the same for all heads."""
    known = (*layout.projections, *layout.inputs, *layout.weights, *_WHOLE)
    named = [name for name, _ in (*mixer.named_parameters(), *mixer.named_buffers())]
    if not all(name.startswith(tuple(f"{each}." for each in known)) or name in known for name in named):
        return False
    outputs = ((find_base(mixer, name).out_features, sections) for name, sections in layout.projections.items())
    if any(size != count_rows(sections) for size, sections in outputs):
        return False
    tensors = ((*found, sections) for name, sections in layout.weights.items() for found in find_tensors(mixer, name))
    return all(count_rows(sections) in holder[key].shape for holder, key, sections in tensors)


def find_base(mixer: nn.Module, name: str) -> Any:
    """Return a linear layer of a mixer, without an adapter."""
    layer = mixer.get_submodule(name)
    return getattr(layer, "base_layer", layer)


# --- kinds ---------------------------------------------------------------------------------------------------------------

_WHOLE = ("norm", "o_norm", "g_a_proj", "forget_gate.f_a_proj", "dt_layernorm", "b_layernorm", "c_layernorm")  # for all heads


def _make(mixer: Any, projections: Mapping[str, Sections], inputs: tuple[str, ...], weights: Any, counts: Any) -> HeadLayout:
    """Keep what a mixer has."""

    def present(sections: Mapping[str, Sections]) -> dict[str, Sections]:
        return {name: each for name, each in sections.items() if _has(mixer, name)}

    return HeadLayout(
        present(projections), tuple(name for name in inputs if _has(mixer, name)), present(weights), present(counts)
    )


def _has(mixer: Any, name: str) -> bool:
    for part in name.split("."):
        mixer = getattr(mixer, part, None)
    return mixer is not None


def _gated_delta_rule(mixer: Any) -> HeadLayout:
    keys = Section(mixer.key_dim, mixer.num_k_heads, "key heads", shared=True)
    values = Section(mixer.value_dim, mixer.num_v_heads, "value heads")
    heads = replace(values, rows=mixer.num_v_heads)
    by_key = Section(2 * (mixer.key_dim + mixer.value_dim), mixer.num_k_heads, "key heads")  # all of a key head, then the next
    projections = {
        "in_proj_qkvz": (by_key,),
        "in_proj_ba": (replace(by_key, rows=2 * mixer.num_v_heads),),
        "in_proj_qkv": (keys, keys, values),
        **dict.fromkeys(("q_proj", "k_proj"), (keys,)),
        **dict.fromkeys(("v_proj", "g_proj", "in_proj_z"), (values,)),
        **dict.fromkeys(("a_proj", "b_proj", "in_proj_a", "in_proj_b"), (heads,)),
    }
    counts = {
        "num_k_heads": (replace(keys, rows=mixer.num_k_heads),),
        "num_v_heads": (heads,),
        "key_dim": (keys,),
        "value_dim": (values,),
        "conv_dim": (keys, keys, values),
    }
    weights = {"conv1d": (keys, keys, values), "A_log": (heads,), "dt_bias": (heads,)}
    return _make(mixer, projections, ("out_proj", "o_proj"), weights, counts)


def _kimi_delta_attention(mixer: Any) -> HeadLayout:
    channels = Section(mixer.qkv_dim, mixer.num_heads, "heads")
    heads = replace(channels, rows=mixer.num_heads)
    wide = ("q_proj", "k_proj", "v_proj", "g_b_proj", "forget_gate.f_b_proj")
    projections = {**dict.fromkeys(wide, (channels,)), "b_proj": (heads,)}
    weights = {"conv1d": (channels,) * 3, "forget_gate.A_log": (heads,), "forget_gate.dt_bias": (channels,)}
    counts = {"num_heads": (heads,), "forget_gate.num_heads": (heads,), "qkv_dim": (channels,), "conv_dim": (channels,) * 3}
    return _make(mixer, projections, ("o_proj",), weights, counts)


def _mamba2(mixer: Any) -> HeadLayout:
    channels = Section(mixer.intermediate_size, mixer.num_heads, "heads")
    heads = replace(channels, rows=mixer.num_heads)
    keys = Section(mixer.n_groups * mixer.ssm_state_size, mixer.n_groups, "groups of heads", shared=True)
    mixed, projected = (channels, keys, keys), (channels, channels, keys, keys, heads)
    weights = {"conv1d": mixed, **dict.fromkeys(("A_log", "D", "dt_bias"), (heads,)), "mup_vector": projected}
    counts = {
        "num_heads": (heads,),
        "n_groups": (replace(keys, rows=mixer.n_groups),),
        "intermediate_size": (channels,),
        "conv_dim": mixed,
    }
    layout = _make(mixer, {"in_proj": projected}, ("out_proj",), weights, counts)
    if isinstance(mixer.norm, nn.Identity):
        return layout
    groups = _count_norm_groups(mixer.norm)
    if groups not in (1, mixer.n_groups):
        raise AttributeError(f"its norm has {groups} groups")
    return replace(layout, weights={**layout.weights, "norm": (channels,)}, norm_groups=groups)


# Gated RMS norms: of all channels, of groups with `group_size`, and of `n_groups`.
GATED_NORM, GATED_NORM_OF_GROUPS, SCALED_NORM_OF_GROUPS = (
    "bamba.BambaRMSNormGated",
    "zamba2.Zamba2RMSNormGated",
    "falcon_h1.FalconH1RMSNormGated",
)


def find_gated_norm(norm: nn.Module) -> str | None:
    return find_form(type(norm), (GATED_NORM, GATED_NORM_OF_GROUPS, SCALED_NORM_OF_GROUPS))


def _count_norm_groups(norm: Any) -> int:
    """Raise AttributeError for an unknown norm."""
    form = find_gated_norm(norm)
    if form is None:
        raise AttributeError(f"a {type(norm).__name__} is no known norm")
    if form == GATED_NORM_OF_GROUPS:
        return len(norm.weight) // int(norm.group_size)
    return int(norm.n_groups) if form == SCALED_NORM_OF_GROUPS else 1


def _mamba(mixer: Any) -> HeadLayout:
    channels = Section(mixer.intermediate_size, mixer.intermediate_size, "channels")
    weights = dict.fromkeys(("conv1d", "dt_proj", "A_log", "D"), (channels,))  # the weight of dt_proj is read without a call
    counts = {"intermediate_size": (channels,)}
    return _make(mixer, {"in_proj": (channels, channels)}, ("x_proj", "out_proj"), weights, counts)


def _short_convolution(mixer: Any) -> HeadLayout:
    convolution = mixer.conv
    channels = Section(convolution.in_channels, convolution.in_channels, "channels")
    return _make(mixer, {"in_proj": (channels,) * 3}, ("out_proj",), {"conv": (channels,)}, {})


# By the function that computes a kind; all of them have convolutions.
_KINDS: Mapping[str, Callable[[Any], HeadLayout]] = {
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _kimi_delta_attention,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba,
    "causal_conv1d_fn": _short_convolution,
}


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
