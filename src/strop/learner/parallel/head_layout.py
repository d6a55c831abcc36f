"""Where the heads of a mixer are in its weights: what a rank that computes some of the heads reads of them.

It follows from the kind of a mixer (the functions that it calls), its layers' names and its own sizes, for any family whose modeling
file names them as Transformers does. A fused projection has several sections: [q | k | v], or [z | x | B | C | dt].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from strop.models.layers.known_code import find_form


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
