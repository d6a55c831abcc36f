"""One attention function for training and generation, registered with Transformers' attention interface.

A model whose attention implementation is ``strop`` passes the queries, keys and values of a flat row of tokens to the *plan* of the
call ``model(..., plan=plan)``. The plan decides which tokens attend to which: ``TreePlan`` for packed training with shared
prefixes, the plans of ``strop.generation.torch`` for a key-value cache. Models are not modified, and learner and engine run the same
module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from strop.sampling import at_least_float32

IMPLEMENTATION = "strop"


@dataclass(frozen=True)
class AttentionSpec:
    """Options of a layer's attention other than the mask."""

    layer: int
    scale: float
    window: int | None = None  # a token attends to itself and to the window - 1 positions before it
    softcap: float | None = None  # logits -> softcap * tanh(logits / softcap), Gemma 2

    def drop_unused_window(self, span: int) -> AttentionSpec:
        """Return the spec without its window if ``span`` positions fit into the window."""
        if self.window is None or span > self.window:
            return self
        return AttentionSpec(self.layer, self.scale, None, self.softcap)


class AttentionPlan(Protocol):
    """Decides which tokens attend to which."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Compute attention: query [T, heads, D], key and value [T, kv_heads, D] of one flat row -> [T, heads, D]."""
        ...


def strop_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    plan: AttentionPlan | None = None,
    **unsupported: Any,
) -> tuple[Tensor, None]:
    """The function that Transformers calls: [1, heads, T, D] -> [1, T, heads, D]."""
    if plan is None:
        raise RuntimeError(
            "attention implementation 'strop' needs a plan: call the model with plan=..., or set another implementation"
        )
    if dropout:
        raise ValueError(
            f"attention dropout is {dropout}: packed attention has none; set attention_dropout to 0 in hf_config_overrides"
        )
    if unsupported.get("s_aux") is not None:
        raise ValueError("attention sinks are not supported by packed attention")
    layer = module.layer_idx
    assert isinstance(layer, int)
    spec = AttentionSpec(layer, scaling if scaling is not None else query.shape[-1] ** -0.5, sliding_window, softcap)
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # rotary embeddings return float32
        query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    return plan.attend(query, key, value, spec).unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, strop_attention)


def mixes_tokens(module: nn.Module) -> bool:
    """Return whether a module mixes tokens. Such modules have a ``layer_idx``, as do the decoder layers that contain them."""
    return hasattr(module, "layer_idx") and not isinstance(module, GradientCheckpointingLayer)


# Up to this many elements of scores, eager attention is used where it is faster than the fused kernel.
MAX_EAGER_SCORES = 1 << 25


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec, *, causal: bool = False
) -> Tensor:
    """[B, heads, Lq, D] x [B, kv_heads, Lk, D] -> [B, heads, Lq, D]; True in a boolean mask means that a query attends to a key."""
    if spec.softcap is None and not _eager_is_faster(query, key):
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=spec.scale, enable_gqa=grouped)
    if causal:
        mask = causal_mask(query.shape[2], key.shape[2], None, query.device)
    return _eager_attention(query, key, value, mask, spec)


def _eager_is_faster(query: Tensor, key: Tensor) -> bool:
    """Return whether eager attention is faster: in bfloat16 on a CPU the fused kernel takes 2 to 5 times as long."""
    on_cpu = query.device.type == "cpu" and query.dtype == torch.bfloat16
    return on_cpu and query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] <= MAX_EAGER_SCORES


def _eager_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    batch, heads, queries, size = query.shape
    kv_heads = key.shape[1]
    rows = (query * spec.scale).reshape(batch, kv_heads, -1, size)  # query heads that share a key-value head are adjacent
    scores = (rows @ key.transpose(2, 3)).view(batch, kv_heads, heads // kv_heads, queries, -1)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if mask is not None:
        scores = scores.masked_fill(~(mask if mask.dim() == 2 else mask.unsqueeze(1)), float("-inf"))
    weights = at_least_float32(scores).softmax(-1).to(value.dtype)
    return (weights.view(batch, kv_heads, -1, key.shape[2]) @ value).view(batch, heads, queries, value.shape[3])


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return a [queries, keys] bool mask; queries are at the last positions of the keys and see ``window`` positions."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


@dataclass(frozen=True, eq=False)
class SiblingSegments:
    """Segments with the same parent, padded to a common length for a single attention call."""

    count: int
    max_length: int
    padded_index: Tensor | None  # [tokens] int64: index of each token in the padded [count * max_length]; None without padding
    prefix: tuple[tuple[int, int, int], ...]  # shared prefix, in order: (family, first, last + 1) of each ancestor

    @property
    def prefix_length(self) -> int:
        return sum(last - first for _, first, last in self.prefix)


class TreePlan:
    """Attention in a forest of segments: a token attends causally to its own segment and fully to its ancestors.

    A token's position is its distance from the root, so sliding windows follow from positions. The cost is that of the real tokens plus
    padding to the longest sibling; a shared prefix is projected and stored once.
    """

    def __init__(self, segment_start: Tensor, segment_length: Tensor, segment_parent: Tensor, device: torch.device) -> None:
        starts, lengths, parents = (column.tolist() for column in (segment_start, segment_length, segment_parent))
        members: dict[int, list[int]] = {}
        for segment, parent in enumerate(parents):
            if lengths[segment]:
                members.setdefault(parent, []).append(segment)
        ranges = {  # segment -> (family, first, last + 1) among the family's tokens
            segment: (
                family,
                sum(lengths[other] for other in segments[:index]),
                sum(lengths[other] for other in segments[: index + 1]),
            )
            for family, segments in enumerate(members.values())
            for index, segment in enumerate(segments)
        }
        self.families = [
            _make_siblings([lengths[segment] for segment in segments], _ancestors(parent, parents, ranges), device)
            for parent, segments in members.items()
        ]
        self.sizes = [sum(lengths[segment] for segment in segments) for segments in members.values()]
        ordered = [segment for segments in members.values() for segment in segments]
        order = torch.cat([torch.arange(starts[segment], starts[segment] + lengths[segment]) for segment in ordered])
        in_order = torch.equal(order, torch.arange(len(order)))
        self.order = None if in_order else order.to(device)  # permutation of the row that groups the tokens of each family
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    def _mask(self, queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
        shape = (queries, keys, window)
        if shape not in self._masks:
            self._masks[shape] = causal_mask(*shape, device)
        return self._masks[shape]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        if self.order is not None:
            query, key, value = (_move_rows(tensor, self.order, None) for tensor in (query, key, value))
        queries, keys, values = (tensor.split(self.sizes) for tensor in (query, key, value))
        outputs = [
            self._attend_family(
                family,
                queries[index],
                (keys[index], _gather_prefix(family, keys)),
                (values[index], _gather_prefix(family, values)),
                spec,
            )
            for index, family in enumerate(self.families)
        ]
        output: Tensor = torch.cat(outputs)
        if self.order is not None:
            output = _move_rows(output, None, self.order)
        return output

    def _attend_family(
        self,
        family: SiblingSegments,
        query: Tensor,
        key: tuple[Tensor, Tensor | None],
        value: tuple[Tensor, Tensor | None],
        spec: AttentionSpec,
    ) -> Tensor:
        span = family.prefix_length + family.max_length
        spec = spec.drop_unused_window(span)
        keys, values = (_prepend_prefix(_pad(tensor, family), prefix) for tensor, prefix in (key, value))
        causal = not family.prefix and spec.window is None
        mask = None if causal else self._mask(family.max_length, span, spec.window, query.device)
        output = masked_attention(_pad(query, family), keys, values, mask, spec, causal=causal)
        flat = output.transpose(1, 2).flatten(0, 1)
        return flat if family.padded_index is None else _move_rows(flat, family.padded_index, None)


def _make_siblings(lengths: list[int], prefix: tuple[tuple[int, int, int], ...], device: torch.device) -> SiblingSegments:
    longest = max(lengths)
    real = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    padded_index = None if bool(real.all()) else real.flatten().nonzero().squeeze(1).to(device)
    return SiblingSegments(len(lengths), longest, padded_index, prefix)


def _ancestors(segment: int, parents: list[int], ranges: dict[int, tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Return the ranges of a segment and its ancestors, from the root down; empty segments are skipped."""
    path: list[tuple[int, int, int]] = []
    while segment != -1:
        if segment in ranges:
            path.insert(0, ranges[segment])
        segment = parents[segment]
    return tuple(path)


def _gather_prefix(family: SiblingSegments, tensors: Sequence[Tensor]) -> Tensor | None:  # [P, heads, D]
    parts = [tensors[index][first:last] for index, first, last in family.prefix]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else None


def _pad(flat: Any, family: SiblingSegments) -> Tensor:
    """[tokens, heads, D] -> [count, heads, max_length, D], padded with zeros."""
    if family.padded_index is not None:
        flat = _move_rows(flat, None, family.padded_index, family.count * family.max_length)
    padded: Tensor = flat.unflatten(0, (family.count, family.max_length))
    return padded.transpose(1, 2)


def _prepend_prefix(tensor: Tensor, prefix: Tensor | None) -> Tensor:
    """Prepend the prefix [P, heads, D], the same for all C, to [C, heads, L, D] -> [C, heads, P + L, D]."""
    if prefix is None:
        return tensor
    return torch.cat([prefix.transpose(0, 1).expand(len(tensor), -1, -1, -1), tensor], dim=2)


class _MoveRows(torch.autograd.Function):
    """Take the rows ``source``, or put rows at the indices ``target`` of ``size`` rows of zeros. Indices do not repeat.

    Each operation is the backward pass of the other: a plain copy, while the backward pass of ``index_select`` accumulates.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor | None, target: Tensor | None, size: int | None = None) -> Tensor:
        ctx.source, ctx.target, ctx.size = source, target, len(rows)
        return _take_rows(rows, source) if source is not None else _put_rows(rows, target, size or len(rows))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        moved = _put_rows(grad, ctx.source, ctx.size) if ctx.source is not None else _take_rows(grad, ctx.target)
        return moved, None, None, None


def _move_rows(rows: Tensor, source: Tensor | None, target: Tensor | None, size: int | None = None) -> Tensor:
    apply: Any = _MoveRows.apply
    moved: Tensor = apply(rows, source, target, size)
    return moved


def _take_rows(rows: Tensor, index: Tensor) -> Tensor:
    return rows.index_select(0, index)


def _put_rows(rows: Tensor, index: Tensor | None, size: int) -> Tensor:
    assert index is not None
    return rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, index, rows)


def scaled_rotary_frequencies(config: Any, kind: str, layer_type: str | None = None) -> tuple[Tensor, float]:
    """Return the frequencies [D / 2] of a rotary embedding with scaling of type ``kind``, and the factor of its cosines and sines."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    options: Any = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **options)
    return frequencies, float(scale)
